"""The indexer of sparse attention (DeepSeek-V3.2, arXiv:2512.02556, section 2.1): short keys, and queries whose scores
say which tokens attention shall see.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.experts.routing import Router, router_logits
from prl.models.layers.rope import Rotation


class Indexer(nn.Module):
    """Frozen, unless it is `trained`: no gradient comes to its weights through a choice, but one may from a loss of its
    own. None leaves it.
    """

    def __init__(self, card: ModelCard, turn: Rotation) -> None:
        super().__init__()
        self.heads, self.dim, self.turn = card.index_n_heads, card.index_head_dim, turn
        self.rope = card.qk_rope_head_dim
        self.wq_b = nn.Linear(card.q_lora_rank, self.heads * self.dim, bias=False)
        self.wk = nn.Linear(card.hidden_size, self.dim, bias=False)
        self.k_norm = nn.LayerNorm(self.dim, eps=1e-6)
        self.weights_proj = Router(card.hidden_size, self.heads, bias=False)
        self.trained = False
        self.requires_grad_(False)

    def forward(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H], q_latent [N, Q] -> queries [N, J, D], their weights [N, J] float32, keys [N, D]."""
        x, q_latent = x.detach(), q_latent.detach()
        with torch.set_grad_enabled(self.trained and torch.is_grad_enabled()):
            return self._make(x, q_latent, cos, sin)

    def _make(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self._turned(self.wq_b(q_latent).view(len(x), self.heads, self.dim), cos, sin)
        k = self._turned(self.k_norm(self.wk(x))[:, None], cos, sin)[:, 0]
        weights = router_logits(x, self.weights_proj.weight) * (self.heads * self.dim) ** -0.5
        return q, weights, k

    def _turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The first dimensions of heads turn, where attention's own turn last."""
        return torch.cat([self.turn(x[..., : self.rope], cos, sin), x[..., self.rope :]], dim=-1)
