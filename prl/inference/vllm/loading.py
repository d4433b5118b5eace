"""New weights into a model of vLLM's that is serving.

Where all layers keep parameters as checkpoints have them (unquantised, Triton experts), new weights are copied straight
into them: the first time by vLLM's own loaders, which are watched; then the same copies are made again, many in one
kernel, and a trainer that sends parts is asked for those alone that are copied (`copies.py`). Other models go through
vLLM's layerwise reload, which holds a layer's tensors until it has them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.distributed import get_world_group
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from prl.inference.vllm.copies import Copies, Copy
from prl.inference.vllm.cpu_reload import forget_kernels, pack_heads
from prl.transport.buckets import Chunk
from prl.transport.kinds import DEVICE_TRANSPORTS
from prl.transport.receiving_nccl import Round, receive_rounds
from prl.transport.to_gpu import on_device
from prl.transport.weights import stage

AS_STORED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # which on GPUs leave weights as they were loaded
EXPERTS_AS_STORED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


def keeps_layout(model: nn.Module) -> bool:
    """Whether all layers compute with parameters as their loaders leave them."""
    if not current_platform.is_cuda():
        return False
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):  # attention kernels keep copies of them
        return False
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, MLAAttention):  # derives matrices of its own
            return False
        if type(method) is UnquantizedFusedMoEMethod:
            if method.unquantized_backend not in EXPERTS_AS_STORED:
                return False
        elif method is not None and type(method) not in AS_STORED:
            return False
    return True


@dataclass(frozen=True)
class StagedParts:
    """What a trainer sends of `wants`: all of it."""

    wants: Copies
    arriving: Iterator[tuple[Round, Tensor]]


Staged = Iterable[Chunk] | StagedParts


class WeightLoader:
    """One model's. `in_place`: whether its parameters are written directly."""

    def __init__(self, model: nn.Module, model_config: Any, in_place: bool) -> None:
        """`model_config`: of vLLM; its dtype is asked for."""
        self.model, self.model_config, self.in_place = model, model_config, in_place
        self.load_weights: Callable[[Iterator[tuple[str, Tensor]]], set[str] | None] = model.load_weights  # type: ignore[assignment]
        self.copies: Copies | None = None  # once they are known

    def load(self, chunks: Iterable[Chunk]) -> None:
        """All parameters anew; a chunk's tensors are not kept beyond it.

        Raises ValueError when a parameter gets nothing, or a tensor of another name or shape comes than before.
        """
        if self.copies is not None:
            self.copies.repeat(chunks)
        elif self.in_place:
            self._watch(chunks)
        else:
            self._reload(chunks)

    @property
    def wants(self) -> Copies | None:
        """For a trainer that sends parts of tensors, which it needs. None: whole ones."""
        return self.copies if self.copies is not None and self.copies.are_boxes else None

    def stage(self, update_info: dict[str, Any], verify: bool, device: torch.device) -> Staged:
        """A version, or some of its tensors, for `load_staged`. Raises as `prl.transport.weights.stage` does."""
        if update_info["type"] == "nccl" and (wants := self.wants) is not None:
            return StagedParts(wants, receive_rounds(update_info, device, wants))
        chunks = stage(update_info, verify, device)
        if update_info["type"] in DEVICE_TRANSPORTS or not self.in_place or get_world_group().world_size > 1:
            return chunks  # of several processes each wants parts of what the host has
        return on_device(chunks, device)

    def load_staged(self, staged: list[Staged]) -> None:
        """All parameters anew, from all that was offered. Raises as `load` does."""
        chunks: list[Iterable[Chunk]] = []
        for offered in staged:
            if isinstance(offered, StagedParts):
                offered.wants.repeat_rounds(offered.arriving)
            else:
                chunks.append(offered)
        if chunks:
            self.load(chain.from_iterable(chunks))

    def _watch(self, chunks: Iterable[Chunk]) -> None:
        recorder = Recorder(self.model)
        with recorder, torch.no_grad():
            loaded = self.load_weights(recorder.named(chunks))
        _check(self._names(), loaded)
        if recorder.complete:
            self.copies = recorder.copies

    def _reload(self, chunks: Iterable[Chunk]) -> None:
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            forget_kernels(self.model)
        served = self._names()
        initialize_layerwise_reload(self.model)
        # scales of quantised layers, which are computed, are served only; a tied head of its own is to be loaded only
        expected = served & self._names()
        # it keeps what it is given until a layer is complete: longer than a chunk holds
        loaded = self.load_weights((name, tensor.clone()) for name, tensor in chain.from_iterable(chunks))
        finalize_layerwise_reload(self.model, self.model_config)
        if on_cpu:
            pack_heads(self.model)
        _check(expected, loaded)

    def _names(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}


def _check(expected: set[str], loaded: set[str] | None) -> None:
    """`loaded`: as vLLM's models tell; the names of parameters are not those of a checkpoint's tensors."""
    if loaded is not None and (missing := sorted(expected - loaded)):
        raise ValueError(f"{len(missing)} parameters got no new weights, among them {', '.join(missing[:3])}")


class Recorder(TorchDispatchMode):
    """Watches a model's loaders: which part of what arrives is copied to which part of which parameter.

    `complete` turns False when parameters are written in any other way, and nothing may be repeated then.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.storages = {p.untyped_storage().data_ptr() for p in chain(model.parameters(), model.buffers())}
        self.arriving: list[tuple[int, int, str, Tensor]] = []  # first byte, end, name, tensor
        self.copies = Copies()
        self.complete = True

    def named(self, chunks: Iterable[Chunk]) -> Iterator[tuple[str, Tensor]]:
        """The tensors, each known from when it is handed out until the next chunk is asked for."""
        for chunk in chunks:
            self.arriving = []
            for name, tensor in chunk:
                first = tensor.data_ptr()
                self.arriving.append((first, first + tensor.numel() * tensor.element_size(), name, tensor))
                self.copies.of[name] = []
                self.copies.form[name] = tensor.shape, tensor.dtype
                self.complete &= tensor.is_contiguous()
                yield name, tensor

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(*args[:2])
        elif func._schema.is_mutable and not _is_padding(func, args):
            self.complete &= not any(self._is_parameter(arg) for arg in args)
        return func(*args, **(kwargs or {}))

    def _is_parameter(self, arg: Any) -> bool:
        return isinstance(arg, Tensor) and arg.untyped_storage().data_ptr() in self.storages

    def _note(self, target: Tensor, source: Tensor) -> None:
        if not source.numel():
            return
        place, is_parameter = source.data_ptr(), self._is_parameter(target)
        for first, end, name, tensor in reversed(self.arriving):
            if first <= place < end:
                self.complete &= is_parameter and source.dtype == tensor.dtype
                offset = (place - first) // source.element_size()
                self.copies.of[name].append(Copy(target, tuple(source.shape), tuple(source.stride()), offset))
                return
        self.complete &= not is_parameter


def _is_padding(func: Any, args: tuple[Any, ...]) -> bool:
    """Zeros beyond what a checkpoint has, which stay as they are."""
    zeroes = func is torch.ops.aten.zero_.default
    return zeroes or (func is torch.ops.aten.fill_.Scalar and args[1] == 0)
