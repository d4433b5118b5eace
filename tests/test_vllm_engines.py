"""Several vLLM processes that work on one request or are one engine, for real, on a CPU.

Runs come first: engines of fixtures stay up until the last test.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import torch
from aiohttp import web
from inference_server import TOKEN
from runs import rows, run
from vllm_server import PLAIN, PROMPT, Server, differences, other_model, serving

from prl.config.schema import RouterConfig, WeightTransportConfig
from prl.inference.guard import Doors
from prl.inference.router.proxy import Router
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.layers.decoder import Decoder
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.pool import EnginePool
from prl.transport.weights import make_publisher

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SMALL = ["inference=vllm", "debug.num_threads=1", "inference.max_num_seqs=8", "deployment.device=cpu",
         "inference.vllm.max_num_batched_tokens=1024"]  # fmt: skip
LONG_PROMPT = [*PROMPT[:-1], *range(32, 32 + 90), *range(40, 40 + 60), PROMPT[-1]]  # 157 tokens
BLOCK_TOKENS = 32


def first_model(server: Server) -> tuple[Path, Decoder]:
    path = resolve_model_path(server.config.model, Path(server.config.cache_dir))
    return path, load_model(path, server.config.model.card, torch.float32, torch.device("cpu"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_name", ["tiny_qwen3", "tiny_llama"])
def test_adapters_alone_reach_the_engine_and_replace_each_other(tmp_path: Path, model_name: str) -> None:
    """Without the adapter, or with the one before, mismatch KL is 5e-3 from the second step on (tried)."""
    small = ["max_steps=3", "algo.batch_size=16", "algo.group_size=4", "eval=none", "ckpt=none", "warm_start=none"]
    lora = [f"model={model_name}", "memory=lora", "weight_transport=lora", "algo=sync", "optim.lr=0.05"]
    done = run([*SMALL, *small, *lora, f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"], tmp_path)
    assert done.code == 0, done.output
    steps = [row for row in rows(tmp_path / "run", "trainer.0") if "mismatch_kl_mean" in row]
    assert len(steps) == 3
    assert max(row["mismatch_kl_mean"] for row in steps) < 1e-9
    assert [path.name for path in sorted((tmp_path / "run/weights").iterdir())] == ["step_2", "step_3"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("model_name", ["tiny_qwen3", "tiny_qwen3_moe"])
def test_tensor_parallel_ranks_cut_the_weights_that_arrive(tmp_path: Path, model_name: str) -> None:
    overrides = [f"model={model_name}", "deployment.num_infer_gpus=2", "inference.tp=2", "weight_transport=tcp"]
    with serving([*SMALL, *overrides], tmp_path / "cache", tmp_path) as server:
        path, model = first_model(server)
        publisher = make_publisher(WeightTransportConfig(type="tcp"), Path(), Path(), "127.0.0.1")
        for version in range(3):
            if version:
                model = other_model(path, server.config, 12 + version)
                (server.update if version == 1 else server.update_from_near)(model, publisher)
            generation = server.sample()
            assert differences(model, generation).max() < 1e-3
            assert set(generation.versions) == {version}


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A prefill and a decode engine; `http` asks the second."""
    overrides = ["deployment.num_infer_gpus=2", "inference.pd.num_prefill_gpus=1",
                 f"inference.vllm.block_size={BLOCK_TOKENS}"]  # fmt: skip
    where = tmp_path_factory.mktemp("apart")
    with serving([*SMALL, *overrides], where / "cache", where) as server:
        yield server


@pytest.mark.exhaustive
def test_a_prompt_is_computed_by_one_engine_and_continued_by_another(apart: Server) -> None:
    """After an update too, and the decode engine computes no more of the prompt than its last, unfilled block."""
    path, model = first_model(apart)
    publisher = apart.file_publisher()
    for seed in (None, 11):
        if seed is not None:
            model = other_model(path, apart.config, seed)
            apart.update(model, publisher)
        received = apart.http.metric("external_prefix_cache_hits_total")
        generation = apart.sample(LONG_PROMPT, max_tokens=24)
        assert len(generation.token_ids) == 24
        assert [*generation.versions] == [apart.version] * 24
        assert differences(model, generation, LONG_PROMPT).max() < 1e-3
        got = apart.http.metric("external_prefix_cache_hits_total") - received
        assert got >= len(LONG_PROMPT) // BLOCK_TOKENS * BLOCK_TOKENS - 1, "the prompt was computed again"


@pytest.mark.exhaustive
@pytest.mark.parametrize("stream", [False, True])
def test_clients_of_the_router_do_not_notice_that_prefill_and_decode_are_apart(apart: Server, stream: bool) -> None:
    urls = {f"inference/{i}": f"http://127.0.0.1:{port}" for i, port in enumerate(apart.ports)}
    body = {"messages": [{"role": "user", "content": "a long question, " * 8}], "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "cache_salt": f"stream {stream}", "stream": stream}  # fmt: skip

    async def scenario() -> str:
        router = Router(RouterConfig(), urls, TOKEN, Doors((TOKEN.encode(),)), apart.kinds)
        runner = web.AppRunner(router.app(), access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        try:
            async with aiohttp.ClientSession(f"http://127.0.0.1:{runner.addresses[0][1]}", headers=headers) as session:
                while not router.is_healthy:
                    await asyncio.sleep(0.05)
                async with session.post("/v1/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                    return await response.text()
        finally:
            await runner.cleanup()

    received = apart.http.metric("external_prefix_cache_hits_total")
    answer = asyncio.run(scenario())
    assert apart.http.metric("external_prefix_cache_hits_total") >= received + BLOCK_TOKENS
    if stream:
        assert answer.rstrip().endswith("data: [DONE]")
        assert answer.count("data: ") > 3
    else:
        assert json.loads(answer)["usage"]["completion_tokens"] == 8


@pytest.fixture(scope="module")
def over_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One engine of two data-parallel ranks, each on a node of its own."""
    overrides = ["model=tiny_qwen3", "deployment=multi_node", "deployment.gpus_per_node=1",
                 "deployment.num_infer_nodes=2", "inference.dp=2", "weight_transport=tcp"]  # fmt: skip
    where = tmp_path_factory.mktemp("over_nodes")
    with serving([*SMALL, *overrides], where / "cache", where) as server:
        yield server


@pytest.mark.exhaustive
def test_an_engine_spans_two_nodes_and_both_get_work_and_weights(over_nodes: Server) -> None:
    path, _ = first_model(over_nodes)
    model = other_model(path, over_nodes.config, 12)
    publisher = make_publisher(WeightTransportConfig(type="tcp"), Path(), Path(), "127.0.0.1")
    over_nodes.update(model, publisher)

    async def many(pool: EnginePool) -> list[Generation]:
        jobs = [pool.generate(PROMPT, 16, i, "a", PLAIN, f"r{i}") for i in range(8)]
        return list(await asyncio.gather(*jobs))

    for generation in over_nodes.with_pool(many):
        assert differences(model, generation).max() < 1e-3
        assert set(generation.versions) == {1}
    assert len(over_nodes.ports) == 1, "the other process computes only"
    by_rank = over_nodes.http.metrics("generation_tokens_total")
    assert len(by_rank) == 2
    assert min(by_rank.values()) > 0, by_rank


def commands_of_vllm() -> list[list[str]]:
    texts = [path.read_text() for path in sorted((Path(__file__).parent / "golden").glob("commands_*.txt"))]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return [shlex.split(line.removeprefix("vllm serve ")) for line in lines if line.startswith("vllm serve ")]


def test_vllm_understands_the_commands_of_the_recorded_layouts() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm"))
    commands = commands_of_vllm()
    assert len(commands) == 22
    for words in commands:
        args = parser.parse_args(words)
        assert args.model == "/models/qwen3_30b_a3b"
        assert args.data_parallel_size in (2, 4, 32)
    assert sum(parser.parse_args(words).headless for words in commands) == 1
