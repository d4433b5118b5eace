"""Sparse attention over packed documents, for the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.layers.attention import SparseAttend
from prl.models.sparse.attention import sparse_attention
from prl.models.sparse.choice import choose_keys


class PackedSparseAttention(SparseAttend):
    """Causal, inside each document; doc_lens sum to N tokens."""

    def __init__(self, doc_lens: list[int], card: ModelCard, device: torch.device) -> None:
        self.count, self.choosing = card.index_topk, card.choosing_layers
        lengths = torch.tensor(doc_lens)
        starts = lengths.cumsum(0) - lengths
        self.low = starts.repeat_interleave(lengths).to(device)
        self.high = torch.arange(1, sum(doc_lens) + 1, device=device)
        self.chosen: dict[int, Tensor] = {}  # layer -> [N, K]

    def choose(self, layer_idx: int, q: Tensor, weights: Tensor, k: Tensor) -> None:
        if layer_idx not in self.chosen:
            self.chosen[layer_idx] = choose_keys(q, weights, k, self.low, self.high, self.count)

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        chosen = self.chosen[self.choosing[layer_idx]]
        return sparse_attention(q, k[:, 0], chosen, v.shape[-1], q.shape[-1] ** -0.5)
