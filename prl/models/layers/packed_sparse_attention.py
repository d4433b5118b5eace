"""Sparse attention over packed documents, for the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.layers.attention import SparseAttend
from prl.models.sparse.attention import sparse_attention
from prl.models.sparse.choice import choose_keys
from prl.models.sparse.indexer_loss import Index, IndexerLoss, with_indexer_loss


class PackedSparseAttention(SparseAttend):
    """Causal, inside each document; doc_lens sum to N tokens."""

    def __init__(self, doc_lens: list[int], card: ModelCard, device: torch.device) -> None:
        self.count, self.longest, self.choosing = card.index_topk, max(doc_lens), card.choosing_layers
        lengths = torch.tensor(doc_lens)
        starts = lengths.cumsum(0) - lengths
        self.low = starts.repeat_interleave(lengths).to(device)
        self.high = torch.arange(1, sum(doc_lens) + 1, device=device)
        self.chosen: dict[int, Tensor] = {}  # layer -> [N, K]
        self.loss: IndexerLoss | None = None  # of indexers that learn
        self.index: Index | None = None  # of the layer that is on, where they do

    def choose(self, layer_idx: int, q: Tensor, weights: Tensor, k: Tensor) -> None:
        if layer_idx not in self.chosen or self.loss is not None:
            k = self.gathered(k)
        if layer_idx not in self.chosen:
            self.chosen[layer_idx] = choose_keys(q, weights, k, self.low, self.high, self.count, self.longest)
        if self.loss is not None:
            self.index = Index(q, weights, k)

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
