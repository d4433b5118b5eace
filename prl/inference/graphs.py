"""Decoding as CUDA graphs: a pass over few tokens is hundreds of kernels that each take less time than their launch.

A graph decodes S rows, those of running sequences and, up to S, idle ones; there is one for each of a few S. Kernels
read each row's own stretch of the cache, so contexts may grow under a graph, and weights are overwritten in place.
"""

from __future__ import annotations

import logging
from collections import Counter

import numpy as np
import torch
from torch import Tensor

from prl.inference.forward import DecodeRows, decode_attention, routing_pieces
from prl.inference.kv_cache import KVCache
from prl.models.experts.routing import RoutingRecorder
from prl.models.layers.decoder import Decoder

log = logging.getLogger(__name__)

PASSES_BEFORE = 2  # of a size, launched kernel by kernel: what compiles has done so, and rare sizes cost no graph


def size_of(rows: int, most: int) -> int:
    """Rows of the graph that decodes so many: powers of two and one between each, at most `most`."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4
    return min(between if rows <= between else power, most)


class FixedRows:
    """What a pass takes, at addresses that stay. An idle row sees the first token of slot 0, and what it writes goes
    where no sequence ever does: to the slot's last place, for a sequence's last token is drawn and not forwarded.
    """

    def __init__(self, model: Decoder, cache: KVCache) -> None:
        self.model, self.cache = model, cache
        self.tokens, self.slots, self.positions = torch.zeros(3, cache.slots, dtype=torch.int64, device=cache.device)
        self.places = torch.full_like(self.slots, cache.shape[3] - 1)
        self.filled: DecodeRows | None = None

    def fill(self, rows: DecodeRows) -> None:
        count = len(rows.sequences)
        if rows is not self.filled:
            self.slots.zero_()
            self.positions.zero_()
            self.places.fill_(self.cache.shape[3] - 1)
            self.slots[:count] = rows.slots
            self.filled = rows
        self.tokens[:count] = rows.last_token
        self.positions[:count] = rows.positions
        self.places[:count] = rows.positions

    def forward(self, size: int, recorder: RoutingRecorder | None) -> Tensor:
        """Logits [S, V] of the first S rows."""
        slots, tokens, positions, places = (x[:size] for x in (self.slots, self.tokens, self.positions, self.places))
        attend = decode_attention(self.cache, slots, positions, places)
        return self.model.logits(self.model(tokens, positions, attend, recorder=recorder))


class DecodeGraphs:
    """The graphs of one engine."""

    def __init__(self, model: Decoder, cache: KVCache, records: bool) -> None:
        self.inputs, self.records = FixedRows(model, cache), records
        # experts in other dtypes ask the host for their sizes
        self.can_capture = cache.device.type == "cuda" and not (
            model.card.num_experts and cache.dtype != torch.bfloat16
        )
        self.forget()

    def forget(self) -> None:
        """Before the cache or the weights move to other addresses."""
        self.passes: Counter[int] = Counter()
        self.captured: dict[int, tuple[torch.cuda.CUDAGraph, RoutingRecorder | None]] = {}
        self.pool = torch.cuda.graph_pool_handle() if self.can_capture else None
        self.logits: Tensor | None = None  # [slots, V], of whichever graph ran last
        self.inputs.filled = None

    @staticmethod
    def suit(cache: KVCache) -> bool:
        """Where kernels write and attend: neither states nor choices of keys have such."""
        return cache.by_kernels and cache.states is None

    def forward(self, rows: DecodeRows) -> tuple[Tensor, list[np.ndarray]]:
        """As `DecodeRows.forward`: logits [B, V], and each row's routing (none if not recorded)."""
        count = len(rows.sequences)
        size = size_of(count, self.inputs.cache.slots)
        self.inputs.fill(rows)
        self.passes[size] += 1
        if self.can_capture and size not in self.captured and self.passes[size] > PASSES_BEFORE:
            self._capture(size)
        if size in self.captured:
            graph, recorder = self.captured[size]
            graph.replay()
            assert self.logits is not None
            logits = self.logits
        else:
            recorder = self._recorder()
            logits = self.inputs.forward(size, recorder)
        rows.positions += 1
        return logits[:count], routing_pieces(recorder, [1] * size, self.inputs.model.card)[:count]

    def _capture(self, size: int) -> None:
        graph, recorder, stream = torch.cuda.CUDAGraph(), self._recorder(), torch.cuda.current_stream()
        if self.logits is None:
            shape = (self.inputs.cache.slots, self.inputs.model.card.vocab_size)
            self.logits = torch.empty(shape, dtype=self.inputs.cache.dtype, device=self.inputs.cache.device)
        try:
            # the thread that stages weights may allocate meanwhile
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                self.logits[:size] = self.inputs.forward(size, recorder)
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own behind
            self.can_capture = False
            log.warning("passes of this model are launched kernel by kernel, for they cannot be captured: %s", error)
            return
        self.captured[size] = graph, recorder

    def _recorder(self) -> RoutingRecorder | None:
        return RoutingRecorder() if self.records else None
