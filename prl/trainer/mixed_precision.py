"""Mixed precision where one rank holds the whole model: parameters in float32, cast for whatever reads them.

FSDP would gather from nobody and reduce with nobody, at the same price on the host: 3 ms a layer of Qwen3-0.6B, forward
and backward, of the 9 that its step then takes on an H200 (documents of 4,096 tokens). Here matrices are cast where
they are multiplied by, within whatever the layer compiles to, and autograd adds up gradients in float32 where the
parameters are. The cast weights are saved for backward, 2 bytes a parameter, but by layers that are recomputed.

Vectors, and matrices of products in float32 (routers), are cast before the model runs, all at once: a compiler that
fuses a cast with its use leaves out the rounding, and engines have rounded weights.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from prl.models.experts.routing import Router
from prl.models.fp8.experts import Fp8Experts
from prl.models.state_space.mixer import keeps_float32


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Have every module of `model` read its floating-point parameters in `dtype`; names, `parameters()` and gradients
    stay those of the parameters themselves, which `get_parameter` no longer finds. What states decay by stays float32,
    as under FSDP.

    A module's class becomes one of its subclasses, the same for modules alike: compiled code serves all of them.
    """
    readers: list[Reader] = []
    for module in model.modules():
        if keeps_float32(module) or isinstance(module, Fp8Experts):
            continue
        held = dict(module.named_parameters(recurse=False, remove_duplicate=False))
        names = [name for name, param in held.items() if param.is_floating_point() and param.dtype != dtype]
        early = tuple(name for name in names if not is_factor(module, held[name]))
        if names:
            kind: Any = type(module)
            module.__class__ = reading_in(kind, tuple(name for name in names if name not in early), early, dtype)
        readers += [(module, name) for name in early]
    if readers:
        model.register_forward_pre_hook(lambda *_: cast_early(readers, dtype))


def is_factor(module: nn.Module, param: Tensor) -> bool:
    return param.dim() > 1 and not isinstance(module, Router)


Reader = tuple[nn.Module, str]  # of a parameter that is cast before the model runs; what it calls it


def cast_early(readers: list[Reader], dtype: torch.dtype) -> None:
    params = {id(param): param for module, name in readers if (param := module._parameters[name]) is not None}
    cast = dict(zip(params, CastTogether.apply(dtype, *params.values()), strict=True))
    if not torch.is_grad_enabled():
        for key, param in params.items():  # a layer may be repeated after this for a pass that had gradients
            cast[key].requires_grad_(param.requires_grad)
    for module, name in readers:
        module.__dict__[_place(name)] = cast[id(module._parameters[name])]


class CastTogether(torch.autograd.Function):
    """Many small tensors, in one operation forward and one backward."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *params: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtypes = [param.dtype for param in params]
        return _together(params, [dtype] * len(params))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        made = [(grad, dtype) for grad, dtype in zip(grads, ctx.dtypes, strict=True) if grad is not None]
        cast = iter(_together([grad for grad, _ in made], [dtype for _, dtype in made]))
        return None, *(None if grad is None else next(cast) for grad in grads)


def _together(tensors: Any, dtypes: list[torch.dtype]) -> tuple[Tensor, ...]:
    cast = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if cast:
        torch._foreach_copy_(cast, list(tensors))
    return tuple(cast)


@functools.cache
def reading_in(
    kind: type[nn.Module], names: tuple[str, ...], early: tuple[str, ...], dtype: torch.dtype
) -> type[nn.Module]:
    """A subclass of `kind` whose attributes `names` and `early` are the parameters called so in `dtype`: the former
    cast at each use, the latter as they were when the model last began to run.
    """
    reads = {name: _at_use(name, dtype) for name in names} | {name: _before(name, dtype) for name in early}
    return type(kind.__name__, (kind,), reads | {"__module__": kind.__module__})


def _at_use(name: str, dtype: torch.dtype) -> property:
    def read(self: nn.Module) -> Tensor:
        param = self._parameters[name]
        assert param is not None
        return param.to(dtype)

    return property(read)


def _before(name: str, dtype: torch.dtype) -> property:
    place = _place(name)

    def read(self: nn.Module) -> Tensor:
        if place in self.__dict__:
            return self.__dict__[place]
        param = self._parameters[name]
        assert param is not None
        return param.to(dtype)

    return property(read)


def _place(name: str) -> str:
    return f"_cast_{name}"
