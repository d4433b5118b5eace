"""A reload of vLLM's that is watched: what it did is repeated without it only where all comes out as it went in."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

SHAPES = {"a": (3, 5), "b": (2, 5), "scale": (5,)}  # of what arrives; the first two are one parameter


def checkpoint(seed: int) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()]


def as_it_is(layer: Any) -> None:
    layer.weight, layer.scale = parameter(layer.weight), parameter(layer.scale)


def turned(layer: Any) -> None:
    layer.weight = parameter(layer.weight.t().contiguous().t())


def rounded(layer: Any) -> None:
    layer.weight = parameter(layer.weight.round())


def rounded_in_place(layer: Any) -> None:
    layer.weight.data.mul_(2)


def rounded_by_copy(layer: Any) -> None:
    layer.weight.data.copy_(layer.weight.round())


def padded(layer: Any) -> None:
    room = torch.zeros(5, 8)
    room[:, :5].copy_(layer.weight)
    layer.weight = parameter(room[:, :5])


def cut(layer: Any) -> None:
    layer.weight = parameter(layer.weight[:4])


def parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor.data, requires_grad=False)


@pytest.fixture
def model() -> Callable[..., Any]:
    """Makes a model of one layer that vLLM quantises so, as it is when it has these weights from the start."""
    from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    class Method(Fp8LinearMethod):
        def __init__(self, process: Callable[[Any], None]) -> None:
            self.process = process

        def process_weights_after_loading(self, layer: Any) -> None:
            self.process(layer)
            layer.kernel = SimpleNamespace(scale=layer.scale)  # as experts' kernels keep it

    class Layer(nn.Module):
        def __init__(self, process: Callable[[Any], None]) -> None:
            super().__init__()
            self.quant_method = Method(process)
            self.weight, self.scale = parameter(torch.empty(5, 5)), parameter(torch.empty(5))
            for name in ("weight", "scale"):
                getattr(self, name).weight_loader = self.load

        @staticmethod
        def load(param: Tensor, loaded_weight: Tensor, first: int = 0) -> None:
            param.data[first : first + len(loaded_weight)].copy_(loaded_weight)

    class Model(nn.Module):
        def __init__(self, process: Callable[[Any], None]) -> None:
            super().__init__()
            self.layer, self.norm = Layer(process), nn.Linear(1, 4, bias=False)

        def load_weights(self, named: Iterator[tuple[str, Tensor]]) -> set[str]:
            for name, tensor in named:
                param = self.layer.scale if name == "scale" else self.layer.weight
                param.weight_loader(param, tensor, **({"first": 3} if name == "b" else {}))
            return {"layer.weight", "layer.scale", "norm.weight"}

    def make(process: Callable[[Any], None], seed: int = 0) -> Any:
        made = Model(process)
        record_metadata_for_reloading(made)
        made.load_weights(iter(checkpoint(seed)))
        made.layer.quant_method.process_weights_after_loading(made.layer)
        return made

    return make


@pytest.mark.parametrize(
    ("process", "learns"),
    [(as_it_is, True), *((way, False) for way in (turned, rounded, rounded_in_place, rounded_by_copy, padded, cut))],
)
def test_a_reload_is_repeated_only_if_everything_stays_as_it_came(
    model: Callable[..., Any], process: Callable[[Any], None], learns: bool
) -> None:
    from prl.inference.vllm.loading import WeightLoader

    served = model(process)
    layer = served.layer
    places = layer.weight.data_ptr(), layer.scale.data_ptr()
    loader = WeightLoader(served, SimpleNamespace(dtype=torch.float32), in_place=False, watched=True)
    for seed in (1, 2, 3):
        loader.load([checkpoint(seed)])
        assert (loader.copies is not None) == learns
        right = model(process, seed).layer
        assert torch.equal(layer.weight, right.weight)
        assert torch.equal(layer.scale, right.scale)
        assert (layer.weight.data_ptr(), layer.scale.data_ptr()) == places
        if learns:
            assert torch.equal(layer.kernel.scale, right.scale), "a kernel goes on with what the reload put in between"
            assert layer.kernel.scale.data_ptr() == layer.scale.data_ptr()
    assert (loader.wants is not None) == learns


def test_without_being_watched_a_reload_stays_one(model: Callable[..., Any]) -> None:
    from prl.inference.vllm.loading import WeightLoader

    served = model(as_it_is)
    loader = WeightLoader(served, SimpleNamespace(dtype=torch.float32), in_place=False)
    for seed in (1, 2):
        loader.load([checkpoint(seed)])
        assert loader.copies is None
        assert torch.equal(served.layer.weight, model(as_it_is, seed).layer.weight)


@pytest.mark.parametrize(
    ("capability", "quantization", "expected"), [(90, "fp8_block", "0"), (100, "fp8_block", None), (90, None, None)]
)
def test_engines_compute_with_the_blocks_that_they_are_sent(
    monkeypatch: pytest.MonkeyPatch, capability: int, quantization: str | None, expected: str | None
) -> None:
    """vLLM quantises them anew for DeepGEMM, which Blackwell's kernels alone need."""
    from prl.config import compose
    from prl.inference.vllm import server

    gpu = SimpleNamespace(has_device_capability=lambda least: capability >= least)
    monkeypatch.setattr(server, "current_platform", gpu)
    config = compose(
        [
            "model=qwen3_0_6b",
            "inference=vllm",
            f"inference.quantization={quantization or 'null'}",
            "model.dtype=bfloat16",
        ]
    )
    assert server.gpu_environment(config).get("VLLM_USE_DEEP_GEMM_E8M0") == expected
