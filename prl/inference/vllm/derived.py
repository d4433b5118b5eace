"""Matrices that vLLM's latent attention makes of its parameters when they are loaded, and computes with.

Unquantised they are views of a parameter (vLLM 0.23) or are filled again where they lie (0.32). Of a quantised one they
are new tensors each time with 0.23, and captured CUDA graphs would go on with those of the version before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import MLAAttention

Tensors = dict[str, Tensor]


class Derived:
    """A model's, layer by layer; they stay where they are."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """`dtype`: in which the model computes."""
        self.dtype = dtype
        self.layers = {name: module for name, module in model.named_modules() if isinstance(module, MLAAttention)}

    @property
    def names(self) -> set[str]:
        """Of those that are parameters of the model, which nobody sends."""
        return {f"{layer}.{name}" for layer, module in self.layers.items() for name in module._parameters}

    def now(self) -> list[Tensors]:
        """What there is of them, for `settle`."""
        return [_tensors_of(layer) for layer in self.layers.values()]

    def renew(self) -> None:
        """Make them of parameters that were written where they lie."""
        before = self.now()
        for layer in self.layers.values():
            layer.process_weights_after_loading(self.dtype)
        self.settle(before)

    @torch.no_grad()
    def settle(self, before: list[Tensors]) -> None:
        """Bring new ones to where those of `before` lie."""
        for layer, old in zip(self.layers.values(), before, strict=True):
            for name, new in _tensors_of(layer).items():
                if name in old and old[name].data_ptr() != new.data_ptr():
                    setattr(layer, name, old[name].copy_(new))


def _tensors_of(layer: nn.Module) -> Tensors:
    """Its own, not those of layers within it."""
    plain = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    registered = {**layer._parameters, **layer._buffers}
    return plain | {name: tensor for name, tensor in registered.items() if tensor is not None}
