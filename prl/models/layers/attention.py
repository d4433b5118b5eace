"""Projections around the attention kernel."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.layers.norm import RMSNorm
from prl.models.layers.rope import rotate

# attend(layer_idx, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]; q and k are already rotated
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    def __init__(self, card: ModelCard, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = card.head_dim
        q_dim, kv_dim = card.num_attention_heads * card.head_dim, card.num_key_value_heads * card.head_dim
        self.q_proj = nn.Linear(card.hidden_size, q_dim, bias=False)
        self.k_proj = nn.Linear(card.hidden_size, kv_dim, bias=False)
        self.v_proj = nn.Linear(card.hidden_size, kv_dim, bias=False)
        self.o_proj = nn.Linear(q_dim, card.hidden_size, bias=False)
        self.q_norm = RMSNorm(card.head_dim, card.rms_norm_eps)
        self.k_norm = RMSNorm(card.head_dim, card.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> q [N, Hq, D], k and v [N, Hkv, D], as `Attend` wants them."""
        heads = (x.shape[0], -1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(x).view(heads)), cos, sin)
        k = rotate(self.k_norm(self.k_proj(x).view(heads)), cos, sin)
        return q, k, self.v_proj(x).view(heads)
