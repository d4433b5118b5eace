"""New weights into a model of vLLM's that is serving.

Where all layers keep parameters as checkpoints have them (unquantised, Triton experts), new weights are copied straight
into them: the first time by vLLM's own loaders, which are watched (`watching.py`); then the same copies are made again,
many in one kernel, and a trainer that sends parts is asked for those alone that are copied (`copies.py`). Other models
go through vLLM's layerwise reload, which holds a layer's tensors until it has them all; in blocks of FP8 it is watched,
too, and done once where all that comes out of it is what went in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import get_world_group
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.fp8 import Fp8LinearMethod, Fp8MoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from prl.inference.vllm.copies import Copies
from prl.inference.vllm.cpu_reload import forget_kernels, pack_heads
from prl.inference.vllm.derived import Derived
from prl.inference.vllm.watching import Recorder
from prl.transport.buckets import Chunk
from prl.transport.kinds import DEVICE_TRANSPORTS
from prl.transport.receiving_nccl import Round, receive_rounds
from prl.transport.to_gpu import on_device
from prl.transport.weights import stage

AS_STORED = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)  # which on GPUs leave weights as they were loaded
EXPERTS_AS_STORED = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.BATCHED_TRITON)


# ... and in blocks of FP8, where scales need no other form
BLOCKS_AS_STORED = tuple(
    backend for backend in Fp8MoeBackend if backend.name in ("TRITON", "BATCHED_TRITON", "DEEPGEMM", "BATCHED_DEEPGEMM")
)


def keeps_layout(model: nn.Module) -> bool:
    """Whether all layers compute with parameters as their loaders leave them."""
    return _all_layers(model, _is_as_stored)


def may_keep_blocks(model: nn.Module) -> bool:
    """Whether all layers do, as far as can be told, if a reload puts what it is given where it lies."""
    return _all_layers(model, lambda layer: _is_as_stored(layer) or _is_in_blocks(layer))


def _all_layers(model: nn.Module, known: Callable[[nn.Module], bool]) -> bool:
    if not current_platform.is_cuda():
        return False
    if any(name.endswith("sinks") for name, _ in model.named_parameters()):  # attention kernels keep copies of them
        return False
    return all(map(known, model.modules()))


def _is_as_stored(layer: nn.Module) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    if type(method) is UnquantizedFusedMoEMethod:
        return method.unquantized_backend in EXPERTS_AS_STORED
    return method is None or type(method) in AS_STORED


def _is_in_blocks(layer: nn.Module) -> bool:
    method: Any = getattr(layer, "quant_method", None)
    if type(method) is Fp8MoEMethod:
        return method.block_quant and method.fp8_backend in BLOCKS_AS_STORED
    if type(method) is Fp8LinearMethod:
        return method.block_quant and not method.use_marlin
    return isinstance(layer, (Attention, MLAAttention))  # whose method is for scales of the KV cache


@dataclass(frozen=True)
class StagedParts:
    """What a trainer sends of `wants`: all of it."""

    wants: Copies
    arriving: Iterator[tuple[Round, Tensor]]


Staged = Iterable[Chunk] | StagedParts


class WeightLoader:
    """One model's."""

    def __init__(self, model: nn.Module, model_config: Any, in_place: bool, watched: bool = False) -> None:
        """`model_config`: of vLLM; its dtype is asked for. in_place: whether parameters are written directly, by vLLM's
        loaders; watched: whether they may be after a reload that left everything as it came.
        """
        self.model, self.model_config, self.in_place, self.watched = model, model_config, in_place, watched
        self.derived = Derived(model, model_config.dtype)
        self.load_weights: Callable[[Iterator[tuple[str, Tensor]]], set[str] | None] = model.load_weights  # type: ignore[assignment]
        self.copies: Copies | None = None  # once they are known

    @staticmethod
    def of(model: nn.Module, model_config: Any) -> WeightLoader:
        """What the model's layers allow."""
        return WeightLoader(model, model_config, keeps_layout(model), watched=may_keep_blocks(model))

    def load(self, chunks: Iterable[Chunk]) -> None:
        """All parameters anew; a chunk's tensors are not kept beyond it.

        Raises ValueError when a parameter gets nothing, or a tensor of another name or shape comes than before.
        """
        if self.copies is not None:
            self.copies.repeat(chunks)
        elif self.in_place:
            self._watch(chunks)
        else:
            before = self.derived.now()
            self._reload(chunks)
            self.derived.settle(before)
            return
        self.derived.renew()

    @property
    def wants(self) -> Copies | None:
        """For a trainer that sends parts of tensors, which it needs. None: whole ones."""
        return self.copies if self.copies is not None and self.copies.are_boxes else None

    def stage(self, update_info: dict[str, Any], verify: bool, device: torch.device) -> Staged:
        """A version, or some of its tensors, for `load_staged`. Raises as `prl.transport.weights.stage` does."""
        if update_info["type"] == "nccl" and (wants := self.wants) is not None:
            return StagedParts(wants, receive_rounds(update_info, device, wants))
        chunks = stage(update_info, verify, device)
        in_place = self.in_place or self.copies is not None
        if update_info["type"] in DEVICE_TRANSPORTS or not in_place or get_world_group().world_size > 1:
            return chunks  # of several processes each wants parts of what the host has
        return on_device(chunks, device)

    def load_staged(self, staged: list[Staged]) -> None:
        """All parameters anew, from all that was offered. Raises as `load` does."""
        chunks: list[Iterable[Chunk]] = []
        for offered in staged:
            if isinstance(offered, StagedParts):
                offered.wants.repeat_rounds(offered.arriving)
                self.derived.renew()
            else:
                chunks.append(offered)
        if chunks:
            self.load(chain.from_iterable(chunks))

    def _watch(self, chunks: Iterable[Chunk]) -> None:
        recorder = Recorder(self._written())
        with recorder, torch.no_grad():
            loaded = self.load_weights(recorder.named(chunks))
        _check(self._names() - self.derived.names, loaded)
        if recorder.complete:
            self.copies = recorder.copies

    def _reload(self, chunks: Iterable[Chunk]) -> None:
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            forget_kernels(self.model)
        served = self._names()
        recorder = Recorder(self._written()) if self.watched else None
        initialize_layerwise_reload(self.model)
        # scales of quantised layers, which are computed, are served only; a tied head of its own is to be loaded only
        expected = served & self._names()
        # it keeps what it is given until a layer is complete: longer than a chunk holds
        if recorder is None:
            loaded = self.load_weights((name, tensor.clone()) for name, tensor in chain.from_iterable(chunks))
            finalize_layerwise_reload(self.model, self.model_config)
        else:
            with recorder:
                loaded = self.load_weights(recorder.cloned(chunks))
                finalize_layerwise_reload(self.model, self.model_config)
        if on_cpu:
            pack_heads(self.model)
        _check(expected, loaded)
        if recorder is not None and recorder.complete:
            self._settle_blocks()
            self.copies = recorder.copies
        self.watched = False  # what was not understood once is not the next time

    def _settle_blocks(self) -> None:
        """Make quantised layers ready once more: their kernels have references to what the reload put in between, which
        are to be to the parameters themselves.
        """
        for name, layer in self.model.named_modules():
            method = getattr(layer, "quant_method", None)
            if isinstance(method, (Fp8LinearMethod, Fp8MoEMethod)):
                before = _addresses(layer)
                method.process_weights_after_loading(layer)
                if _addresses(layer) != before:
                    raise RuntimeError(f"{name}: vLLM made other parameters of its parameters than the first time")

    def _written(self) -> Iterator[Tensor]:
        """The parameters, and what else there may be of what comes; attention makes its own."""
        for module in self.model.modules():
            if not isinstance(module, (Attention, MLAAttention)):
                yield from chain(module.parameters(recurse=False), module.buffers(recurse=False))

    def _names(self) -> set[str]:
        return {name for name, _ in self.model.named_parameters()}


def _addresses(layer: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in layer.named_parameters(recurse=False)}


def _check(expected: set[str], loaded: set[str] | None) -> None:
    """`loaded`: as vLLM's models tell; the names of parameters are not those of a checkpoint's tensors."""
    if loaded is not None and (missing := sorted(expected - loaded)):
        raise ValueError(f"{len(missing)} parameters got no new weights, among them {', '.join(missing[:3])}")
