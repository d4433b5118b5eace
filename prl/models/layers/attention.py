"""Projections around the attention kernel."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.layers.norm import RMSNorm
from prl.models.layers.rope import rotate

# attend(layer_idx, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, V]) -> [N, Hq, V], V <= D; q and k are already rotated
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class SparseAttend(abc.ABC):
    """`Attend` to the keys that indexers choose, in the absorbed form of latent attention: q [N, Hq, C + R],
    k [N, 1, C + R] and of it v [N, 1, C]. A layer's choice is made once in the life of this object: a layer that is
    repeated for backward attends to what it attended to before.
    """

    @abc.abstractmethod
    def choose(self, layer_idx: int, q: Tensor, weights: Tensor, k: Tensor) -> None:
        """q [N, J, D], weights [N, J], k [N, D] of the layer's indexer."""

    @abc.abstractmethod
    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """-> [N, Hq, C]"""


class LatentAttend(abc.ABC):
    """`Attend` that makes keys and values of latents itself: see `LatentAttention.expand`."""

    @abc.abstractmethod
    def __call__(self, layer_idx: int, q: Tensor, latents: Tensor, of_keys: Tensor, of_values: Tensor) -> Tensor:
        """q [N, Hq, D], latents [N, C + R], of_keys [Hq, D - R, C], of_values [Hq, V, C] -> [N, Hq, V]."""


QkNorm = Literal["head", "all"]  # of each head alone, or of all heads of a token together


class Attention(nn.Module):
    """Grouped-query attention (arXiv:2305.13245)."""

    def __init__(
        self, card: ModelCard, layer_idx: int, qk_norm: QkNorm | None = "head", output_bias: bool = False
    ) -> None:
        """output_bias: of o_proj; that of q, k and v is the card's."""
        super().__init__()
        self.layer_idx, self.head_dim, self.qk_norm = layer_idx, card.head_dim, qk_norm
        q_dim, kv_dim = card.num_attention_heads * card.head_dim, card.num_key_value_heads * card.head_dim
        self.q_proj = nn.Linear(card.hidden_size, q_dim, bias=card.attention_bias)
        self.k_proj = nn.Linear(card.hidden_size, kv_dim, bias=card.attention_bias)
        self.v_proj = nn.Linear(card.hidden_size, kv_dim, bias=card.attention_bias)
        self.o_proj = nn.Linear(q_dim, card.hidden_size, bias=output_bias)
        if qk_norm is not None:
            self.q_norm = RMSNorm(card.head_dim if qk_norm == "head" else q_dim, card.rms_norm_eps)
            self.k_norm = RMSNorm(card.head_dim if qk_norm == "head" else kv_dim, card.rms_norm_eps)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> q [N, Hq, D], k and v [N, Hkv, D], as `Attend` wants them."""
        q, k, v = self.multiply(x)
        if self.qk_norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.view(len(x), -1, self.head_dim) for y in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def output(self, attended: Tensor) -> Tensor:
        """attended [N, Hq, D] -> [N, H]."""
        return self.o_proj(attended.flatten(1))

    def multiply(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> [N, Hq * D] and twice [N, Hkv * D]."""
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)
