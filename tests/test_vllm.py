"""vLLM itself as the inference engine, on a CPU: one server for the whole module, as `python -m prl.inference` runs it.

What is after the test that kills it starts servers of its own. Whole runs: test_vllm_runs.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from inference_server import TOKEN
from openai_requests import check_completions, check_models_and_refusals, check_stream, make_client
from runs import run
from tiny import sets_of
from vllm_server import PLAIN, PROMPT, Server, differences, other_model, serving, trainer_logprobs
from weight_updates import published

from prl.config import compose
from prl.config.schema import RunConfig, SamplingConfig
from prl.inference.engine import TorchEngine
from prl.inference.sampling import SamplingParams
from prl.inference.sequences import Request
from prl.inference.server import eos_token_ids
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.checkpoints.writing import hf_tensors
from prl.models.layers.decoder import Decoder
from prl.models.text.tokenizer import load_tokenizer
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.concurrency import EngineLoad
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.engines.requests import PAUSE
from prl.orchestrator.engines.watch import parse_loads
from prl.transport.weights import Publisher

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

OVERRIDES = [
    "inference=vllm", "debug.num_threads=1", "inference.max_num_seqs=32",
    "inference.vllm.max_num_batched_tokens=4096",
]  # fmt: skip


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return compose([f"cache_dir={tmp_path_factory.mktemp('cache')}", *OVERRIDES], config_name="inference")


@pytest.fixture(scope="module")
def server(config: RunConfig, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(OVERRIDES, Path(config.cache_dir), tmp_path_factory.mktemp("server")) as server:
        yield server


@pytest.fixture(scope="module")
def path(config: RunConfig) -> Path:
    return resolve_model_path(config.model, Path(config.cache_dir))


def test_the_openai_package_is_served(server: Server) -> None:
    client = make_client(server.http.port, TOKEN)
    check_completions(client)
    check_stream(client)
    check_models_and_refusals(client)


# --- the orchestrator's client does not notice ------------------------------------------------------------------------


def test_the_server_starts_with_the_checkpoint_and_its_versions(server: Server, path: Path) -> None:
    model = load_model(path, server.config.model.card, torch.float32, torch.device("cpu"))
    generation = server.sample(max_tokens=40)
    assert len(generation.token_ids) == 40
    assert [*generation.versions] == [0] * 40
    assert differences(model, generation).max() < 1e-4
    assert server.http.get("/weight_info").body == {"weight_version": "0"}
    assert server.http.get("/v1/models").body["data"][0]["id"] == server.config.model.name
    info = server.http.get("/server_info?config_format=json").body
    assert info["vllm_config"]["scheduler_config"]["max_num_batched_tokens"] == 4096


def test_a_checkpoint_without_a_tokenizer_is_served_with_that_of_bytes(tmp_path: Path) -> None:
    from prl.inference.vllm.server import with_byte_tokenizer

    config = compose(["inference=vllm", f"cache_dir={tmp_path}"], "inference")
    for _ in range(2):  # the second finds it there
        place = with_byte_tokenizer(config).model.tokenizer
        assert place == str(tmp_path / "byte_tokenizer")
        assert load_tokenizer(config.model.model_copy(update={"tokenizer": place}), tmp_path).encode("a")[0] == 97
    assert [entry.name for entry in tmp_path.iterdir()] == ["byte_tokenizer"]


@pytest.mark.parametrize("temperature", [0.7, 1.3])
def test_logprobs_are_of_the_distribution_sampled_from(server: Server, path: Path, temperature: float) -> None:
    model = load_model(path, server.config.model.card, torch.float32, torch.device("cpu"))
    generation = server.sample(sampling=SamplingConfig(temperature=temperature))
    assert differences(model, generation, temperature=temperature).max() < 1e-4

    top = server.sample(sampling=SamplingConfig(temperature=temperature, top_k=4))
    logprobs = trainer_logprobs(model, PROMPT + top.token_ids, temperature)[len(PROMPT) - 1 : -1]
    best = logprobs.topk(4)
    for token, given, values, ids in zip(top.token_ids, top.logprobs, best.values, best.indices, strict=True):
        expected = torch.log_softmax(values, -1)[ids.tolist().index(token)]
        assert abs(given - float(expected)) < 1e-4


def test_flat_logprobs_are_the_same_numbers(server: Server) -> None:
    (flat,) = server.http.generate("f", temperature=0.0, flat_logprobs=True).body["choices"]
    (choice,) = server.http.generate("g", temperature=0.0).body["choices"]
    assert flat["logprobs"] is None
    assert "token_logprobs" not in choice
    assert flat["token_logprobs"] == pytest.approx([c["logprob"] for c in choice["logprobs"]["content"]], abs=1e-4)
    assert flat | {"logprobs": 0, "token_logprobs": 0} == choice | {"logprobs": 0, "token_logprobs": 0}
    two = server.http.generate("n", n=2, flat_logprobs=True).body["choices"]
    assert [len(one["token_logprobs"]) for one in two] == [8, 8]
    assert two[0]["token_logprobs"] != two[1]["token_logprobs"]
    (top,) = server.http.generate("t", temperature=0.0, flat_logprobs=True, logprobs=2).body["choices"]
    assert len(top["logprobs"]["content"][0]["top_logprobs"]) == 2  # more than numbers were asked for


def test_frames_hold_the_same_numbers(server: Server) -> None:
    asked = {"flat_logprobs": True, "n": 2, "seed": 3}
    plain = server.http.generate("f", **asked).body
    framed = server.http.generate("g", **asked, extra_args={"frames": True}).body
    assert framed["usage"] == plain["usage"]
    for one, other in zip(framed["choices"], plain["choices"], strict=True):
        assert one["token_ids"].tolist() == other["token_ids"]
        assert one["token_logprobs"] == pytest.approx(other["token_logprobs"], abs=1e-4)
        numbers = {"token_ids": 0, "token_logprobs": 0}
        assert one | numbers == other | numbers


@pytest.mark.parametrize("changes", [{}, {"top_p": 0.5}, {"min_p": 0.3}], ids=["top_k", "top_p", "min_p"])
def test_what_tokens_were_drawn_from_is_told(server: Server, path: Path, changes: dict[str, float]) -> None:
    """As the trainer computes it: the ratio of a token is 1 within what was kept, and nowhere else."""
    model = load_model(path, server.config.model.card, torch.float32, torch.device("cpu"))
    sampling = SamplingConfig(temperature=1.5, top_k=4, **changes)
    telling = {"extra_args": {"kept_tokens": True}, "logprobs": 20}
    top = server.with_pool(lambda pool: pool.generate(PROMPT, 24, 3, "s", sampling, "r", telling=telling))
    assert top.kept is not None
    logprobs = trainer_logprobs(model, PROMPT + top.token_ids, 1.5)[len(PROMPT) - 1 : -1]
    for token, given, row, kept in zip(top.token_ids, top.logprobs, logprobs, sets_of(top.kept), strict=True):
        among = torch.tensor(kept)
        assert set(kept) <= set(row.topk(4).indices.tolist())
        assert len(kept) == 4 or changes
        assert abs(given - float(torch.log_softmax(row[among], -1)[kept.index(token)])) < 1e-4
    sizes = top.kept.counts
    assert len(top.token_ids) == 24
    assert sizes.max() > 1, "something was left to draw from"
    # a server that is not of this run: objects of several logprobs
    del telling["extra_args"]
    plain = server.with_pool(
        lambda pool: pool.generate(PROMPT, 24, 3, "s", sampling, "r", telling=telling | {"flat_logprobs": False})
    )
    assert plain.token_ids == top.token_ids
    assert plain.kept is not None
    for one, other in zip(sets_of(plain.kept), sets_of(top.kept), strict=True):
        assert sorted(one) == sorted(other)


def test_ends_are_those_of_the_builtin_engine(server: Server, path: Path) -> None:
    """Greedy, so that both say the same; a stop token is part of the completion, and its logprob too."""
    model = other_model(path, server.config, 9)
    server.update(model, server.file_publisher())
    engine = TorchEngine(model, server.config.inference, eos_token_ids=())
    greedy = greedy_tokens(engine, ())
    stop = next(token for i, token in enumerate(greedy) if i >= 3 and token not in greedy[:i])
    for stops in ((), (stop,)):
        expected = greedy_tokens(engine, stops)
        generation = server.sample(sampling=SamplingConfig(temperature=0.0, stop_token_ids=stops))
        assert generation.token_ids == expected
        assert len(generation.logprobs) == len(expected)
        assert generation.finish_reason == ("stop" if stops else "length")
    assert expected[-1] == stop


def greedy_tokens(engine: TorchEngine, stops: tuple[int, ...]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=24, stop_token_ids=stops)
    sequences = engine.prepare(Request("r", PROMPT, params))
    engine.submit(sequences)
    while engine.busy:
        engine.step()
    return sequences[0].completion_ids


def test_the_eos_ends_a_completion(server: Server, path: Path) -> None:
    (eos, *_) = eos_token_ids(256, path, server.config.model.card.vocab_size)
    bias = {"logit_bias": {str(eos): 100}, "ignore_eos": False}
    choice = server.http.generate(max_tokens=8, **bias).body["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"]) == ("stop", None, [eos])


def test_refusals_are_engine_errors(server: Server) -> None:
    with pytest.raises(EngineError, match=r"generate by 400: .*token ids"):
        server.sample([10**6])
    with pytest.raises(EngineError, match="generate by 400: "):
        server.sample([1] * 300)


def test_requests_of_a_paused_engine_are_counted_and_answered_later(server: Server) -> None:
    async def barrier(pool: EnginePool) -> list[Generation]:
        await pool.everywhere(PAUSE)
        jobs = [asyncio.create_task(pool.generate(PROMPT, 4, i, "a", PLAIN, f"r{i}")) for i in range(8)]
        deadline = time.monotonic() + 120
        while await pool.queued(0) < 8:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.3)
        assert not any(job.done() for job in jobs)
        await pool.everywhere("/resume")
        return list(await asyncio.gather(*jobs))

    assert [len(generation.token_ids) for generation in server.with_pool(barrier)] == [4] * 8


def test_its_metrics_say_how_full_it_is(server: Server) -> None:
    """Under the names that the orchestrator looks for."""

    async def looks(pool: EnginePool) -> list[EngineLoad]:
        idle = parse_loads(await pool.scrape(0))
        seen = asyncio.Event()

        async def keep_busy(seed: int) -> None:
            while not seen.is_set():
                await pool.generate(PROMPT, 240, seed, "a", PLAIN, f"r{seed}")

        jobs = [asyncio.create_task(keep_busy(i)) for i in range(40)]
        deadline, fullest = time.monotonic() + 120, idle["0"]
        while not (fullest.running + fullest.waiting > 20 and fullest.kv_usage > 0.3):
            assert time.monotonic() < deadline, fullest
            assert not any(job.done() for job in jobs)
            fullest = max(fullest, parse_loads(await pool.scrape(0))["0"], key=lambda load: load.kv_usage)
            await asyncio.sleep(0.01)
        seen.set()
        await asyncio.gather(*jobs)
        return [idle["0"], fullest]

    idle, fullest = server.with_pool(looks)
    assert (idle.running, idle.waiting, idle.kv_usage) == (0, 0, 0.0)
    assert fullest.running <= 32
    assert fullest.kv_usage <= 1.0


@pytest.mark.parametrize("route", ["/metrics", "/v1/models", "/is_paused", "/weight_info", "/docs"])
def test_all_routes_but_health_want_a_key(server: Server, route: str) -> None:
    for key in (None, "", "wrong"):
        assert server.http.get(route, key=key).status == 401
        assert server.http.post("/pause?mode=keep", key=key).status == 401
        assert server.http.get("/health", key=key).status == 200
    assert server.http.get(route).status == 200
    assert server.http.get("/is_paused").body == {"is_paused": False}


# --- weights ----------------------------------------------------------------------------------------------------------


def test_each_update_changes_every_weight(server: Server, path: Path) -> None:
    """Two updates, for what breaks at the second only."""
    publisher = server.file_publisher()
    before = server.sample()
    for seed in (1, 2):
        model = other_model(path, server.config, seed)
        assert differences(model, before).max() > 0.1
        server.update(model, publisher)
        before = server.sample()
        assert [*before.versions] == [server.version] * 24
        assert differences(model, before).max() < 1e-3
        assert server.http.get("/weight_info").body == {"weight_version": str(server.version)}


def test_running_requests_go_on_and_say_which_weights_made_each_token(server: Server, path: Path) -> None:
    old = other_model(path, server.config, 3)
    publisher = server.file_publisher()
    server.update(old, publisher)
    preempted = server.http.metric("num_preemptions_total")
    crossing, seed = [], 3
    while not crossing:  # this process may be too slow to update before all have ended; then once more
        old, seed = other_model(path, server.config, seed), seed + 1
        first, generations = update_in_flight(server, publisher, other_model(path, server.config, seed))
        crossing = [g for g in generations if len(set(g.versions)) == 2]
    for generation in crossing:
        assert [*generation.versions] == sorted(generation.versions)
        assert set(generation.versions) == {first, first + 1}
        count = [*generation.versions].index(first + 1)
        by_old = differences(old, generation)
        assert by_old[:count].max() < 1e-3  # none too young ...
        assert by_old[count:].max() > 0.1  # ... and none too old
    starts = [float(differences(old, g)[[*g.versions].index(first + 1)]) for g in crossing]
    assert max(starts) > 1e-3, "the first token of the new label is of the old weights"
    assert server.http.metric("num_preemptions_total") == preempted, "KV was dropped"


def update_in_flight(server: Server, publisher: Publisher, new: Decoder) -> tuple[int, list[Generation]]:
    """An update while 16 requests run, if they still do; the version before it, and what came."""
    first = server.version
    info = published(publisher, first + 1, hf_tensors(new))
    read, generated = (server.http.metric(f"{name}_total") for name in ("prompt_tokens", "generation_tokens"))

    async def scenario(pool: EnginePool) -> list[Generation]:
        jobs = [asyncio.create_task(pool.generate(PROMPT, 240, i, "a", PLAIN, f"r{i}")) for i in range(16)]
        deadline = time.monotonic() + 120
        for name, enough in (("prompt", read + 16 * len(PROMPT)), ("generation", generated + 16 * 8)):
            while await asyncio.to_thread(server.http.metric, f"{name}_tokens_total") < enough:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.001)
        await pool.update_weights(first + 1, info)
        return list(await asyncio.gather(*jobs))

    generations = server.with_pool(scenario)
    server.version += 1
    return first, generations


def test_a_prefix_of_older_weights_is_not_reused(server: Server, path: Path) -> None:
    prompt = [*PROMPT[:-1], *range(97, 97 + 26), *range(40, 40 + 120), PROMPT[-1]]  # more than one block
    publisher = server.file_publisher()
    server.sample(prompt)
    hits = server.http.metric("prefix_cache_hits_total")
    server.sample(prompt)
    assert server.http.metric("prefix_cache_hits_total") > hits
    model = other_model(path, server.config, 5)
    server.update(model, publisher)
    assert differences(model, server.sample(prompt), prompt).max() < 1e-3


def test_a_rollout_in_flight_finds_its_prefix_after_an_update(server: Server, path: Path) -> None:
    long = [PROMPT[0], *range(1, 200), *PROMPT[-2:]]  # blocks of a CPU are 128 tokens
    first = server.sample(long, max_tokens=2, salt="a rollout")
    assert first.cached_tokens == 0
    update = other_model(path, server.config, 6)
    server.update(update, server.file_publisher())
    assert server.sample(long, max_tokens=2, salt="a rollout").cached_tokens == 128
    assert server.sample(long, max_tokens=2, salt="a later one").cached_tokens == 0


def test_a_damaged_version_changes_nothing(server: Server, path: Path) -> None:
    publisher = server.file_publisher()
    good = other_model(path, server.config, 6)
    server.update(good, publisher)
    file = Path(published(publisher, 99, hf_tensors(other_model(path, server.config, 7)))["path"]) / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    info = {"type": "filesystem", "path": str(file.parent), "version": 99}
    with pytest.raises(EngineError, match=r"update_weights by 500: .*is damaged"):
        server.with_pool(lambda pool: pool.update_weights(99, info))
    assert server.http.get("/weight_info").body == {"weight_version": str(server.version)}
    server.http.post("/resume")
    assert differences(good, server.sample()).max() < 1e-3
    server.http.post("/init_weight_transfer_engine", {"init_info": {"verify_checksum": False}})
    server.with_pool(lambda pool: pool.update_weights(99, info))
    server.http.post("/init_weight_transfer_engine", {"init_info": {"verify_checksum": True}})
    server.version = 99
    assert differences(good, server.sample()).max() > 0.1


def test_weights_of_another_model_are_refused(server: Server, path: Path) -> None:
    publisher = server.file_publisher()
    model = other_model(path, server.config, 8)
    some = [(name, tensor) for name, tensor in hf_tensors(model) if "layers.0.self_attn" not in name]
    info = published(publisher, 100, some)
    with pytest.raises(EngineError, match=r"finish_weight_update by 500: .*got no new weights"):
        server.with_pool(lambda pool: pool.update_weights(100, info))


# --- the process tree -------------------------------------------------------------------------------------------------


def test_killing_the_root_leaves_no_process(server: Server) -> None:
    """vLLM's engine core outlives a parent that is killed; the run's reaper does not let it."""
    family = [server.process, *server.process.children(recursive=True)]
    names = " ".join(" ".join(process.cmdline()) for process in family)
    assert "EngineCore" in names, names
    assert "prl.runtime.process.child" in names, names
    server.process.kill()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive, [process.cmdline() for process in alive]


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("no_such_argument=1", "unrecognized arguments: --no-such-argument=1"),
        pytest.param("block_size=7", "No common block size for 7", marks=pytest.mark.exhaustive),  # by its engine
    ],
)
def test_an_argument_that_vllm_does_not_take_is_the_users_to_mend(
    config: RunConfig, tmp_path: Path, argument: str, said: str
) -> None:
    args = [*OVERRIDES, f"cache_dir={config.cache_dir}", f"inference.vllm.{argument}"]
    done = run(args, tmp_path, "prl.inference", timeout_s=300)
    assert done.code == 2, done.output
    assert f"vLLM refuses its arguments: {said}" in done.output


def test_routed_experts_are_refused_where_nothing_records_them(config: RunConfig, tmp_path: Path) -> None:
    """On CPUs vLLM's Model Runner V2 wants a Triton that the package index does not have."""
    args = [*OVERRIDES, f"cache_dir={config.cache_dir}", "inference.return_routed_experts=true"]
    done = run(args, tmp_path, "prl.inference", timeout_s=300)
    assert done.code == 2, done.output
    assert "vLLM cannot return routed experts on this CPU." in done.output
    assert "inference=torch" in done.output


def test_the_experts_that_vllm_chooses_replay_in_the_trainer(config: RunConfig, tmp_path: Path) -> None:
    """Layers, rows and numbers of experts mean the same: in float32 both choose alike, but for a tie now and then."""
    args = ["inference=vllm", f"cache_dir={config.cache_dir}", "debug.num_threads=1"]
    done = run(args, tmp_path, "prl.bench.router_replay", timeout_s=300)
    assert done.code == 0, done.output
    measured = dict(re.findall(r"^ *([a-zA-Z, ]+?)  ([-+.e0-9]+|nan)$", done.output, re.MULTILINE))
    assert float(measured["tokens"]) == 256 * 24
    assert float(measured["rerouted"]) < 1e-3
    assert float(measured["largest KL with"]) < 1e-6


FORKING = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
import torch
from prl.config import compose
from prl.inference.vllm.server import prepare
from prl.planning import make_plan

plan = make_plan(compose(sys.argv[1:], config_name="inference"))
torch.set_num_threads(4)
role = plan.servers()[0]
endpoints = {role.name: "http://127.0.0.1:1"}
prepare(SimpleNamespace(plan=plan, role=role, init_model_path=None, resume_step=0, endpoints=endpoints))
assert torch.get_num_threads() == 4
child = os.fork()
if child == 0:
    torch.zeros(512, 1024)  # as the first that vLLM's engine makes: large enough for several threads
    os._exit(0)
deadline = time.monotonic() + 20
while not os.waitpid(child, os.WNOHANG)[0]:
    if time.monotonic() > deadline:
        os.kill(child, 9)
        raise SystemExit("the fork hangs")
    time.sleep(0.05)
"""


def test_an_engine_forked_after_a_model_was_made_computes(tmp_path: Path) -> None:
    """On GPUs vLLM forks its engine; this server makes the model before it, if nobody has."""
    large = ["model=qwen3_0_6b", "model.path=null", "model.tokenizer=byte", "model.card.num_hidden_layers=1"]
    args = ["inference=vllm", f"cache_dir={tmp_path}/cache", *large, "model.card.vocab_size=1024"]
    done = subprocess.run([sys.executable, "-c", FORKING, *args], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list((tmp_path / "cache" / "models").iterdir()), "no model was made"
