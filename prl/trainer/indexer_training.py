"""Indexers of sparse attention that learn: from the attention's own distribution over the keys that they chose, besides
the loss of the job and apart from it (`prl.models.sparse.indexer_loss`).

The loss is `model.indexer_loss_coef` times the mean over the step's trained tokens of KL(attention || indexer), added
up over the layers that choose. A query counts where its next token is trained. Layers that share a choice have no say
in it: its target is the distribution of the layer that chose. `optim.max_grad_norm` bounds all gradients together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prl.models.layers.attention import Attend, LatentAttend
from prl.models.layers.indexer import Indexer
from prl.models.layers.packed_sparse_attention import PackedSparseAttention
from prl.models.sparse.indexer_loss import IndexerLoss


def train_indexers(model: nn.Module) -> None:
    """From now on they are parameters like others: before sharding, and before optimizers ask which there are."""
    for module in model.modules():
        if isinstance(module, Indexer):
            module.trained = True
            module.requires_grad_(True)


class IndexerTraining:
    """coef 0: indexers stay as they are, and rows of metrics say nothing of them."""

    def __init__(self, model: nn.Module, coef: float, device: torch.device) -> None:
        self.coef, self.layers = coef, sum(isinstance(module, Indexer) for module in model.modules())
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.tokens = 0

    def begin(self, attend: Attend | LatentAttend, rows: Tensor, tokens: int) -> None:
        """rows [M]: this rank's queries that count in the coming micro-batch, `tokens` those of the whole step; 0 where
        nothing is trained.
        """
        if self.coef > 0 and tokens > 0 and torch.is_grad_enabled():
            assert isinstance(attend, PackedSparseAttention), "attention with indexers"
            attend.loss = IndexerLoss(rows, self.coef / tokens, self.total)
            self.tokens = tokens

    def step(self) -> dict[str, float]:
        """indexer_kl: nats, the mean over trained tokens and layers since the last step. A collective of the world."""
        if self.coef == 0:
            return {}
        if dist.get_world_size() > 1:
            dist.all_reduce(self.total)
        mean = self.total.item() / max(self.tokens * self.layers, 1)
        self.total.zero_()
        return {"indexer_kl": mean}
