"""Sparse attention over packed documents, for the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.device import to_device
from prl.models.layers.attention import SparseAttend
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.models.sparse.attention import sparse_attention
from prl.models.sparse.choice import choose_keys
from prl.models.sparse.indexer_loss import Index, IndexerLoss, with_indexer_loss


class PackedSparseAttention(SparseAttend):
    """Causal, inside each document; doc_lens sum to N tokens. With `prefixes` N are those that are run: queries choose
    among the keys of their whole document, T over all, which are told apart by where they are run once they are chosen.
    """

    def __init__(
        self, doc_lens: list[int], card: ModelCard, device: torch.device, prefixes: SharedPrefixes | None = None
    ) -> None:
        self.count, self.longest, self.choosing = card.index_topk, max(doc_lens), card.choosing_layers
        lengths = torch.tensor(doc_lens)
        starts = lengths.cumsum(0) - lengths
        low, high = starts.repeat_interleave(lengths), torch.arange(1, sum(doc_lens) + 1)
        self.place: Tensor | None = None  # [T] int64
        if prefixes is not None:
            low, high, self.place = low[prefixes.run], high[prefixes.run], to_device(prefixes.place, device)
        self.low, self.high = to_device(low, device), to_device(high, device)
        self.chosen: dict[int, Tensor] = {}  # layer -> [N, K]
        self.loss: IndexerLoss | None = None  # of indexers that learn
        self.index: Index | None = None  # of the layer that is on, where they do

    def choose(self, layer_idx: int, q: Tensor, weights: Tensor, k: Tensor) -> None:
        if layer_idx not in self.chosen or self.loss is not None:
            k = self.gathered(k)
        if layer_idx not in self.chosen:
            self.chosen[layer_idx] = self._choose(q, weights, k)
        if self.loss is not None:
            self.index = Index(q, weights, k)

    @torch.no_grad()  # what it would save is not saved when a layer is repeated, which finds its choice made
    def _choose(self, q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
        keys = k if self.place is None else k[self.place]
        chosen = choose_keys(q, weights, keys, self.low, self.high, self.count, self.longest)
        if self.place is None:
            return chosen
        return torch.where(chosen < 0, -1, self.place[chosen.clamp(min=0).long()].to(chosen.dtype))

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen, latents, scale = self.chosen[self.choosing[layer_idx]], self.gathered(k)[:, 0], q.shape[-1] ** -0.5
        out = sparse_attention(q, latents, chosen, v.shape[-1], scale)
        if self.loss is None or self.index is None:
            return out
        index, self.index = self.index, None  # layers that share a choice come after the one that makes it
        return with_indexer_loss(out, index, (q, latents, chosen, scale), self.loss)

    def gathered(self, x: Tensor) -> Tensor:
        """x [n, ...] of the tokens that are here -> of all tokens of the row."""
        return x
