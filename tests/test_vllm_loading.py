"""How weights get into vLLM's models: its own loaders watched once, and their copies repeated."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from weight_rounds import send, shards

from prl.config import compose
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.checkpoints.writing import hf_tensors
from prl.transport.boxes import Table
from prl.transport.buckets import Assembler, Chunk, fill, parts_of
from prl.transport.rounds import Schedule

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

BUCKET = 1 << 16  # bytes: a layer does not fit into two


@pytest.fixture(scope="module")
def vllm_ranks() -> Iterator[None]:
    """vLLM's process groups, of this process alone."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
    yield
    cleanup_dist_env_and_memory()


@contextmanager
def vllm_models(path: Path, dtype: str = "float32") -> Iterator[Any]:
    """`make()`: another model of vLLM's for this checkpoint, of arbitrary numbers, as loaders want it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    latent = json.loads((path / "config.json").read_text()).get("kv_lora_rank")
    args = EngineArgs(
        model=str(path),
        dtype=dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        attention_backend="CPU_MLA" if latent else None,  # as engines are started here, on CPUs with AMX too
    )
    config = args.create_engine_config()
    config.compilation_config.static_forward_context.clear()

    def make() -> tuple[nn.Module, Any]:
        config.compilation_config.static_forward_context.clear()
        with set_current_vllm_config(config), set_default_torch_dtype(getattr(torch, dtype)):
            return initialize_model(config), config.model_config

    with set_current_vllm_config(config):
        yield make


def weights(path: Path, overrides: list[str], seed: int) -> list[tuple[str, Tensor]]:
    """A checkpoint of random numbers, of the names and shapes of the one at `path`."""
    config = compose(overrides)
    model = load_model(path, config.model.card, torch.float32, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(tensor.shape, generator=generator)) for name, tensor in hf_tensors(model)]


def arriving(named: list[tuple[str, Tensor]]) -> Iterator[Chunk]:
    """As device transports bring them: in two buckets that take turns, each overwritten as soon as it may be."""
    buckets, assembler = [torch.empty(BUCKET, dtype=torch.uint8) for _ in range(2)], Assembler()
    for number, (parts, runs) in enumerate(parts_of(named, BUCKET)):
        fill(buckets[number % 2], runs)
        yield assembler.take(buckets[number % 2], parts)
        buckets[number % 2].fill_(255)


LATENT = ["model.card.kv_lora_rank=512", "model.card.qk_rope_head_dim=64", "model.card.head_dim=96"]
MODELS = ["tiny_llama", "tiny_qwen3", "tiny_qwen3_moe", "tiny_glm4_moe", "tiny_deepseek_v3", "tiny_glm4_moe_lite"]


@pytest.fixture(params=MODELS)
def overrides(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    latent = LATENT if request.param in ("tiny_deepseek_v3", "tiny_glm4_moe_lite") else []
    return [f"cache_dir={tmp_path}", f"model={request.param}", *latent]


def test_copies_are_those_of_vllms_loaders(vllm_ranks: None, tmp_path: Path, overrides: list[str]) -> None:
    from prl.inference.vllm.loading import WeightLoader

    path = resolve_model_path(compose(overrides).model, tmp_path)
    with vllm_models(path) as make:
        served, model_config = make()
        loader = WeightLoader(served, model_config, in_place=True)
        for seed in (1, 2, 3):
            expected, _ = make()
            expected.load_weights(iter(weights(path, overrides, seed)))
            loader.load(arriving(weights(path, overrides, seed)))
            assert loader.copies is not None, "vLLM's loaders were not understood"
            assert_same(served, expected)
        with pytest.raises(ValueError, match=r"1 tensors did not come, among them model.embed_tokens.weight"):
            loader.load(arriving(weights(path, overrides, 4)[1:]))
        with pytest.raises(ValueError, match=r"model.embed_tokens.weight: torch.float64 .* before .*torch.float32"):
            loader.load([[(name, tensor.double())] for name, tensor in weights(path, overrides, 4)])


def test_the_parts_that_are_copied_are_enough(vllm_ranks: None, tmp_path: Path, overrides: list[str]) -> None:
    """As trainer ranks send them, each from its own rows."""
    from prl.inference.vllm.loading import WeightLoader

    path = resolve_model_path(compose(overrides).model, tmp_path)
    with vllm_models(path) as make:
        served, model_config = make()
        loader = WeightLoader(served, model_config, in_place=True)
        assert loader.wants is None, "the first time, nobody knows"
        loader.load(arriving(weights(path, overrides, 1)))
        named = weights(path, overrides, 2)
        table = Table.of(named)
        assert loader.wants is not None
        wanted = loader.wants.boxes(table)
        holdings = shards(table, 3, by_columns=False)
        schedule = Schedule.of(table, holdings, BUCKET)
        (incoming,), (got,) = send(schedule, holdings, named, [wanted], verify=True)
        loader.wants.repeat_rounds(zip(incoming.rounds, got, strict=True))
        expected, _ = make()
        expected.load_weights(iter(named))
        assert_same(served, expected)
        with pytest.raises(ValueError, match=r"1 tensors did not come, among them model.embed_tokens.weight"):
            loader.wants.boxes(Table.of(named[1:]))


def test_latent_attention_makes_its_matrices_anew_where_they_lie(vllm_ranks: None, tmp_path: Path) -> None:
    """Also where they are no views of a parameter: captured graphs read them at their addresses."""
    from prl.inference.vllm.derived import Derived
    from prl.inference.vllm.loading import WeightLoader

    overrides = [f"cache_dir={tmp_path}", "model=tiny_deepseek_v3", *LATENT]
    path = resolve_model_path(compose(overrides).model, tmp_path)
    with vllm_models(path) as make:
        (served, model_config), (expected, _) = make(), make()
        loader = WeightLoader(served, model_config, in_place=True)
        loader.load(arriving(weights(path, overrides, 1)))
        assert loader.copies is not None
        layers = Derived(served, torch.float32).layers
        assert len(layers) == compose(overrides).model.card.num_hidden_layers
        for layer in layers.values():
            layer.W_UV = nn.Parameter(layer.W_UV.clone(), requires_grad=False)
        before = {name: (layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr()) for name, layer in layers.items()}
        assert len({place for places in before.values() for place in places}) == 2 * len(layers)
        loader.load(arriving(weights(path, overrides, 2)))
        expected.load_weights(iter(weights(path, overrides, 2)))
        for name, there in Derived(expected, torch.float32).layers.items():
            there.process_weights_after_loading(torch.float32)
            assert torch.equal(layers[name].W_UV, there.W_UV)
            assert torch.equal(layers[name].W_UK_T, there.W_UK_T)
        assert before == {name: (layer.W_UV.data_ptr(), layer.W_UK_T.data_ptr()) for name, layer in layers.items()}


def test_matrices_that_are_made_anew_are_brought_to_where_the_old_ones_lie(
    vllm_ranks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM 0.23 makes those of quantised weights, in a reload too."""
    from prl.inference.vllm.derived import Derived

    overrides = [f"cache_dir={tmp_path}", "model=tiny_deepseek_v3", *LATENT]
    with vllm_models(resolve_model_path(compose(overrides).model, tmp_path)) as make:
        derived = Derived(make()[0], torch.float32)
        for number, layer in enumerate(derived.layers.values()):
            layer.made = torch.zeros(3)

            def process(_: torch.dtype, layer: Any = layer, number: int = number) -> None:
                layer.made = torch.full((3,), 1.0 + number)

            monkeypatch.setattr(layer, "process_weights_after_loading", process)
        places = [layer.made.data_ptr() for layer in derived.layers.values()]
        derived.renew()
        assert [layer.made.data_ptr() for layer in derived.layers.values()] == places
        assert [layer.made[0].item() for layer in derived.layers.values()] == [1.0 + n for n in range(len(places))]


def test_a_reload_does_not_rely_on_what_buckets_held(vllm_ranks: None, tmp_path: Path, overrides: list[str]) -> None:
    """vLLM's layerwise reload keeps a layer's tensors until the last one comes."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from prl.inference.vllm.loading import WeightLoader

    path = resolve_model_path(compose(overrides).model, tmp_path)
    with vllm_models(path) as make:
        (served, model_config), (expected, _) = make(), make()
        for model, seed in ((served, 0), (expected, 1)):
            model.load_weights(iter(weights(path, overrides, seed)))
            process_weights_after_loading(model, model_config, torch.device("cpu"))
        assert not torch.equal(outputs(served), outputs(expected))
        WeightLoader(served, model_config, in_place=False).load(arriving(weights(path, overrides, 1)))
        assert torch.equal(outputs(served), outputs(expected))
        assert_same(served, expected)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("model", ["tiny_glm4_moe", "tiny_deepseek_v3"])
def test_corrections_of_routers_stay_exact_in_a_bfloat16_engine(
    vllm_ranks: None, tmp_path: Path, model: str, in_place: bool
) -> None:
    """As large as Nemotron 3's, whose differences bfloat16 does not have."""
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    from prl.inference.vllm.loading import WeightLoader

    config = compose([f"cache_dir={tmp_path}", f"model={model}", *(LATENT if "deepseek" in model else [])])
    path = resolve_model_path(config.model, tmp_path)
    trained = load_model(path, config.model.card, torch.float32, torch.device("cpu"))
    for bias in trained.checkpoint_buffers().values():
        bias.copy_(57 + 0.04 * torch.randn(bias.shape, generator=torch.Generator().manual_seed(1)))
    sent = dict(hf_tensors(trained, torch.bfloat16))  # as the trainer sends with model.dtype=bfloat16
    with vllm_models(path, "bfloat16") as make:
        served, model_config = make()
        if not in_place:
            served.load_weights(iter(sent.items()))
            process_weights_after_loading(served, model_config, torch.device("cpu"))
            with torch.no_grad():
                for name, param in served.named_parameters():
                    if name.endswith("e_score_correction_bias"):
                        param.zero_()
        WeightLoader(served, model_config, in_place).load(arriving(list(sent.items())))
    there = {name: param for name, param in served.named_parameters() if name.endswith("e_score_correction_bias")}
    assert len(there) == len(config.model.card.sparse_layers) > 0
    for name, bias in there.items():
        assert bias.dtype == torch.float32
        assert torch.equal(bias, sent[name])
        assert not torch.equal(bias, bias.bfloat16().float())


def test_a_rank_gets_its_part() -> None:
    """As tensor parallelism cuts columns, and leaves out what other ranks have."""
    from prl.inference.vllm.loading import WeightLoader

    class Part(nn.Linear):
        def load_weights(self, named: Iterator[tuple[str, Tensor]]) -> set[str]:
            for name, tensor in named:
                if name == "mine":
                    self.weight.data[2:].copy_(tensor.narrow(1, 3, 3))
            return {"weight"}

    model = Part(3, 4, bias=False)
    loader = WeightLoader(model, SimpleNamespace(dtype=torch.float32), in_place=True)
    for version in (1.0, 2.0):
        whole = version * torch.arange(12.0).view(2, 6)
        loader.load([[("theirs", -whole), ("mine", whole)]])
        assert loader.copies is not None
        assert torch.equal(model.weight[2:], whole[:, 3:])


@pytest.mark.parametrize("kind", ["computed", "filled", "kept elsewhere"])
def test_a_loader_that_does_more_than_copy_is_watched_in_vain(kind: str) -> None:
    """What it does could not be repeated: every update goes through it."""
    from prl.inference.vllm.loading import WeightLoader

    class More(nn.Linear):
        def load_weights(self, named: Iterator[tuple[str, Tensor]]) -> set[str]:
            for _, tensor in named:
                if kind == "filled":
                    self.weight.data.fill_(tensor[0, 0].item())
                else:
                    self.weight.data.copy_(tensor * 1 if kind == "computed" else tensor)
                if kind == "kept elsewhere":
                    elsewhere.copy_(tensor)
            return {"weight"}

    model, elsewhere = More(3, 5, bias=False), torch.empty(5, 3)
    loader = WeightLoader(model, SimpleNamespace(dtype=torch.float32), in_place=True)
    for version in (1.0, 2.0):
        loader.load([[("w", torch.full((5, 3), version))]])
        assert loader.copies is None
        assert torch.equal(model.weight, torch.full((5, 3), version))


def outputs(model: nn.Module) -> Tensor:
    """Of every linear layer, whose parameters are packed away on CPUs."""
    from vllm.model_executor.layers.linear import LinearBase

    layers = [module for module in model.modules() if isinstance(module, LinearBase)]
    return torch.cat([layer.quant_method.apply(layer, torch.ones(1, layer.input_size)).flatten() for layer in layers])


def assert_same(found: nn.Module, expected: nn.Module) -> None:
    there = dict(found.named_parameters())
    for name, param in expected.named_parameters():
        assert torch.equal(there[name], param), name
