"""Activation checkpointing (arXiv:1604.06174): tensors saved for backward are dropped, and made again when backward
asks for them.

What is dropped are the saved tensors of a *region*, one call of a function; its inputs are kept. As in
`torch.utils.checkpoint` (non-reentrant), a region that backward reaches runs once more, up to the last tensor that is
missing. Beyond that, a region's *outputs* can be remade: where code after it saves them (a projection its normed input,
the attention kernel q, k and v), autograd keeps a handle, and all of them share one repetition. So the attention kernel
sees its q, k and v dropped, though it is in no region and never runs twice.

Regions do not nest: inside one, the others are plain calls. Nothing intercepts operators, so compiled functions may lie
inside, and the price on the host is a few microseconds for each saved tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from prl.config.schema import ActivationCheckpointing
from prl.models.experts.stacked import Experts
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.hybrid import StateSpaceLayer
from prl.models.layers.mlp import DenseMLP, SparseMLP
from prl.trainer.memory.saved_tensors import Pack, Stored, current_pack, packing

# without targets: all that costs no second attention, MLP or dispatch
DEFAULT_TARGETS = ("norm", "act", "attn_proj")


def apply_checkpointing(model: Decoder, ac: ActivationCheckpointing, compiled: bool = False) -> None:
    """Recompute activations in backward, as `ac` says; after compilation of the layers' parts and before sharding.

    Mode full drops all of every `freq`-th layer but its input. Mode selective drops, in every layer, the `targets`:

        norm       the normed inputs of attention and MLP
        act        the product inside SwiGLU, and silu(gate)
        attn_proj  q, k, v and all on the way to them, normed input included: repeats norm, projections, rotation; in
                   state-space layers what the convolution and the gate are made from, and what the scan reads:
                   repeats the convolution, too
        scan       of state-space layers what the scan gives and what the gated norm makes of it: repeats both, the
                   convolution and under context parallelism the exchange of heads included
        mlp, moe   everything inside the MLP block: repeats it, for experts routing and token exchange included

    compiled: whether the layers' parts are compiled. Inside these the compiler decides what is kept of norms and
    activations, so that `norm` and `act` apply to what is left: the norm before a router, and the experts' activation.
    """
    if ac.mode == "full":
        for index in range(0, len(model.layers), ac.freq):
            layer = model.layers[index]
            _override(layer, "forward", in_scope(recomputed(layer.forward)))
    elif ac.mode == "selective":
        for layer in model.layers:
            assert isinstance(layer, DecoderLayer), "the targets are parts of our own layers"
            _apply_targets(layer, frozenset(ac.targets or DEFAULT_TARGETS), compiled)


def _apply_targets(layer: DecoderLayer, targets: frozenset[str], compiled: bool) -> None:
    if layer.mixes_tokens:
        if "attn_proj" in targets:
            _override(layer, "project", recomputed(layer.project, outputs=True))
            if isinstance(layer, StateSpaceLayer):
                _override(layer.mamba, "convolve", recomputed(layer.mamba.convolve, outputs=True))
        elif "norm" in targets and not compiled:
            norm = layer.input_layernorm
            _override(norm, "forward", recomputed(norm.forward, outputs=True))
        if isinstance(layer, StateSpaceLayer) and "scan" in targets:
            _override(layer.mamba, "along", recomputed(layer.mamba.along, outputs=True))
            if not compiled:
                _override(layer.mamba.norm, "forward", recomputed(layer.mamba.norm.forward, outputs=True))
    if layer.has_mlp:
        _apply_mlp_targets(layer, targets, compiled)
    _override(layer, "forward", in_scope(layer.forward))


def _apply_mlp_targets(layer: DecoderLayer, targets: frozenset[str], compiled: bool) -> None:
    dense = isinstance(layer.mlp, DenseMLP)
    if targets & {"mlp", "moe"}:
        _override(layer, "mlp_block", recomputed(layer.mlp_block))
    elif not (dense and compiled):
        if "norm" in targets:
            norm = layer.post_attention_layernorm
            _override(norm, "forward", recomputed(norm.forward, outputs=True))
        if "act" in targets:
            for holder in _holders(layer.mlp, compiled):
                _override(holder, "activate", recomputed(holder.activate, outputs=True))


def _holders(mlp: DenseMLP | SparseMLP, compiled: bool) -> list[DenseMLP | Experts]:
    """Those with an activation that is not inside a compiled part."""
    if isinstance(mlp, DenseMLP):
        return [mlp]
    shared = [] if mlp.shared_experts is None or compiled else [mlp.shared_experts]
    return [mlp.experts, *shared]


def _override(module: torch.nn.Module, method: str, function: Callable[..., Any]) -> None:
    """On this instance alone; parameters keep their names."""
    setattr(module, method, function)


# --- scopes -----------------------------------------------------------------------------------------------------------


class Scope:
    """One layer's forward pass: which tensors regions could make again."""

    def __init__(self) -> None:
        self.keep: Pack = current_pack()
        self.remakeable: dict[StorageWeakRef, tuple[Region, int]] = {}

    def pack(self, tensor: Tensor) -> Tensor | Stored:
        if self.remakeable:
            source = self.remakeable.get(StorageWeakRef(tensor.untyped_storage()))
            if source is not None and source[0].outputs[source[1]].dtype == tensor.dtype:
                return Output(*source, tensor)
        return self.keep(tensor)


_scope: ContextVar[Scope | None] = ContextVar("scope", default=None)  # None: regions are plain calls


def in_scope(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A layer's forward, in which regions are at work."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        scope = Scope()
        token = _scope.set(scope)
        try:
            with packing(scope.pack):
                return forward(*args, **kwargs)
        finally:
            _scope.reset(token)

    return run


def recomputed(function: Callable[..., Any], outputs: bool = False) -> Callable[..., Any]:
    """`function` as a region. With `outputs`, what it returns is made again too, for whoever saves it later in the same
    scope. Tensors that need a gradient are arguments of their own, not inside tuples.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        scope = _scope.get()
        if scope is None or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        region = Region(function, args, kwargs, scope.pack)
        token = _scope.set(None)
        try:
            with packing(region.drop):
                result = function(*args, **kwargs)
        finally:
            _scope.reset(token)
        if outputs:
            for index, tensor in enumerate(_as_tuple(result)):
                region.outputs.append(Layout(tensor))
                scope.remakeable[StorageWeakRef(tensor.untyped_storage())] = (region, index)
        return result

    return run


def _as_tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


# --- regions ----------------------------------------------------------------------------------------------------------


class Layout:
    """Where a tensor's numbers lie in its storage."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset, self.nbytes = tensor.storage_offset(), tensor.untyped_storage().nbytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Region:
    """One call of `function`, and what is needed to repeat it."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], pack: Pack) -> None:
        self.function = function
        self.args = [_hold(arg, pack) for arg in args]
        self.kwargs = {name: _hold(arg, pack) for name, arg in kwargs.items()}
        self.dropped: list[torch.Size] = []  # shapes of the tensors saved inside
        self.outputs: list[Layout] = []
        self.uses: dict[int, int] = {}  # of outputs: handles not fetched yet
        self.remade: dict[int, Tensor] = {}  # tensors saved inside, until they are fetched
        self.remade_outputs: dict[int, Tensor] = {}  # until the last of their handles is fetched

    def drop(self, tensor: Tensor) -> Stored:
        self.dropped.append(tensor.shape)
        return Dropped(self, len(self.dropped) - 1)

    def remake(self) -> None:
        args = [_release(arg) for arg in self.args]
        kwargs = {name: _release(arg) for name, arg in self.kwargs.items()}
        count = 0

        def capture(tensor: Tensor) -> None:
            nonlocal count
            assert self.dropped[count : count + 1] == [tensor.shape], "a region did not repeat itself"
            self.remade[count] = tensor
            count += 1
            if count == len(self.dropped) and not self.uses:
                raise _Complete

        token = _scope.set(None)
        try:
            with torch.enable_grad(), saved_tensors_hooks(capture, _never):
                outputs = _as_tuple(self.function(*args, **kwargs))
            assert count == len(self.dropped), "a region did not repeat itself"
            self._take_outputs(outputs)
        except _Complete:
            pass
        finally:
            _scope.reset(token)

    def _take_outputs(self, outputs: tuple[Tensor, ...]) -> None:
        for index, missing in self.uses.items():
            if missing:
                assert Layout(outputs[index]) == self.outputs[index], "a region did not repeat itself"
                self.remade_outputs[index] = outputs[index].detach()


class _Complete(Exception):
    """All that a region dropped is there again."""


def _never(packed: Any) -> Tensor:
    raise AssertionError("no backward runs through a repeated region")


class Argument:
    """A tensor that a region was called with."""

    def __init__(self, tensor: Tensor, pack: Pack) -> None:
        self.requires_grad = tensor.requires_grad
        self.stored = pack(tensor.detach())

    def fetch(self) -> Tensor:
        tensor = self.stored if isinstance(self.stored, Tensor) else self.stored.fetch()
        return tensor.detach().requires_grad_(self.requires_grad)


def _hold(arg: Any, pack: Pack) -> Any:
    return Argument(arg, pack) if isinstance(arg, Tensor) else arg


def _release(arg: Any) -> Any:
    return arg.fetch() if isinstance(arg, Argument) else arg


class Dropped:
    """Stands for a tensor saved inside a region."""

    def __init__(self, region: Region, index: int) -> None:
        self.region, self.index = region, index

    def fetch(self) -> Tensor:
        if self.index not in self.region.remade:
            self.region.remake()
        return self.region.remade.pop(self.index)


class Output:
    """Stands for a region's output, or a view of it, that was saved after the region."""

    def __init__(self, region: Region, index: int, tensor: Tensor) -> None:
        self.region, self.index, self.layout = region, index, Layout(tensor)
        region.uses[index] = region.uses.get(index, 0) + 1

    def fetch(self) -> Tensor:
        region, index = self.region, self.index
        if index not in region.remade_outputs:
            region.uses[index] = max(region.uses[index], 1)  # a second backward through a graph that was retained
            region.remake()
        whole = region.remade_outputs[index]
        region.uses[index] -= 1
        if region.uses[index] == 0:
            del region.remade_outputs[index]
        return whole.as_strided(self.layout.size, self.layout.stride, self.layout.offset)
