"""Decoding as CUDA graphs: a pass over few tokens is hundreds of kernels that each take less time than their launch.

A graph decodes the slots [0, S) where they lie, those in use and those that are not, and is kept for a few S. Kernels
read each slot's own stretch of the cache, so contexts may grow under it, and weights are overwritten in place.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.inference.forward import DecodeRows, decode_attention, routing_pieces
from prl.inference.kv_cache import KVCache
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.decoder import Decoder

log = logging.getLogger(__name__)

PASSES_BEFORE = (
    2  # of a size, launched one by one: what compiles and allocates has done so, and one-off sizes cost none
)


def size_of(slots: int, most: int) -> int:
    """Slots of the graph that decodes the first `slots`: powers of two and one between each, at most `most`."""
    power = 1 << (slots - 1).bit_length()
    between = power * 3 // 4
    return min(between if slots <= between else power, most)


class SlotRows:
    """One token of each slot, at addresses that stay. A slot not in use gets a token of its own, whose keys and values
    go where no sequence's ever do: its last one is drawn and not forwarded.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.slots = torch.arange(cache.slots, device=cache.device)
        self.tokens, self.positions = torch.zeros_like(self.slots), torch.zeros_like(self.slots)
        self.idle = torch.full_like(self.slots, cache.shape[3] - 1)
        self.places = self.idle.clone()
        self.filled: DecodeRows | None = None

    def fill(self, rows: DecodeRows) -> None:
        if rows is not self.filled:
            self.positions.zero_()
            self.places.copy_(self.idle)
            self.filled = rows
        self.tokens.index_copy_(0, rows.slots, rows.last_token)
        self.positions.index_copy_(0, rows.slots, rows.positions)
        self.places.index_copy_(0, rows.slots, rows.positions)

    def forward(self, size: int, recorder: RoutingRecorder | None) -> Tensor:
        """Logits [S, V] of the slots [0, S)."""
        slots, tokens, positions, places = (x[:size] for x in (self.slots, self.tokens, self.positions, self.places))
        attend = decode_attention(self.cache, slots, positions, places)
        return self.model.logits(self.model(tokens, positions, attend, recorder=recorder))


@dataclass(frozen=True)
class Captured:
    graph: torch.cuda.CUDAGraph
    logits: Tensor  # [S, V]
    recorder: RoutingRecorder | None


class DecodeGraphs:
    """The graphs of one engine, for as long as its cache and its weights stay where they are."""

    def __init__(self, model: Decoder, cache: KVCache, records: bool) -> None:
        self.inputs, self.records = SlotRows(model, cache), records
        self.passes: Counter[int] = Counter()
        self.captured: dict[int, Captured] = {}
        self.can_capture = cache.device.type == "cuda"
        self.pool = torch.cuda.graph_pool_handle() if self.can_capture else None

    @staticmethod
    def suit(cache: KVCache) -> bool:
        """On a GPU, where layers have keys and values of their own: what kernels there are, states and choices of keys
        have not.
        """
        return cache.by_kernels and cache.states is None

    def forward(self, rows: DecodeRows) -> tuple[Tensor, list[np.ndarray]]:
        """As `DecodeRows.forward`: logits [B, V], and each row's routing (none if not recorded)."""
        size = size_of(rows.num_slots, self.inputs.cache.slots)
        self.inputs.fill(rows)
        self.passes[size] += 1
        if self.can_capture and size not in self.captured and self.passes[size] > PASSES_BEFORE:
            self._capture(size)
        if size in self.captured:
            found = self.captured[size]
            found.graph.replay()
            logits, recorder = found.logits, found.recorder
        else:
            recorder = self._recorder()
            logits = self.inputs.forward(size, recorder)
        rows.positions += 1
        pieces = routing_pieces(recorder, [1] * size, self.inputs.model.card)
        chosen = [s.slot for s in rows.sequences]
        return logits[rows.slots], [pieces[slot] for slot in chosen] if pieces else []

    def _capture(self, size: int) -> None:
        graph, recorder = torch.cuda.CUDAGraph(), self._recorder()
        try:
            # the thread that stages weights may allocate meanwhile
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                logits = self.inputs.forward(size, recorder)
        except RuntimeError as error:
            self.can_capture = False
            log.warning("passes of this model are launched kernel by kernel, for they cannot be captured: %s", error)
            return
        self.captured[size] = Captured(graph, logits, recorder)

    def _recorder(self) -> RoutingRecorder | None:
        return RoutingRecorder() if self.records else None
