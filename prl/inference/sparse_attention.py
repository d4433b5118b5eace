"""Sparse attention over the cache: prefill and decode alike, for every query has its own stretch of cached tokens."""

from __future__ import annotations

from torch import Tensor

from prl.config.schema import ModelCard
from prl.inference.kv_cache import KVCache
from prl.models.layers.attention import SparseAttend
from prl.models.sparse.attention import sparse_attention
from prl.models.sparse.choice import choose_keys


class CachedSparseAttention(SparseAttend):
    """slots and positions [N] int64: where the tokens of this forward pass lie; each sees its slot up to itself.
    longest: positions are below it.
    """

    def __init__(self, cache: KVCache, card: ModelCard, slots: Tensor, positions: Tensor, longest: int) -> None:
        self.cache, self.count, self.longest, self.choosing = cache, card.index_topk, longest, card.choosing_layers
        self.slots, self.positions = slots, positions
        self.low = slots * cache.shape[3]
        self.high = self.low + positions + 1
        self.chosen: dict[int, Tensor] = {}

    def choose(self, layer_idx: int, q: Tensor, weights: Tensor, k: Tensor) -> None:
        keys = self.cache.index[self.cache.index_rows[layer_idx]]
        keys[self.slots, self.positions] = k
        keys = keys.flatten(0, 1)
        self.chosen[layer_idx] = choose_keys(q, weights, keys, self.low, self.high, self.count, self.longest)

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.cache.write(layer_idx, self.slots, self.positions, k, v)
        latents = self.cache.k[layer_idx].flatten(0, 2)
        chosen = self.chosen[self.choosing[layer_idx]]
        return sparse_attention(q, latents, chosen, v.shape[-1], q.shape[-1] ** -0.5)
