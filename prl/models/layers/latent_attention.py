"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads are made from
one short vector of a token, the latent, beside one key that is turned by position and shared by all heads.

A head's key is [its part of the latent, not turned | the shared key, turned]. Two forms give the same: the expanded one
makes keys and values of every head, as training wants them; the absorbed one takes the queries to the latent instead,
so that a cache holds the latent and the shared key alone, and attention is that of many query heads over one key head.
Left to `LatentAttend`, latents are expanded by whoever attends, behind what moves them between ranks.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.layers.norm import RMSNorm
from prl.models.layers.rope import rotate_pairs, yarn_temperature


class LatentAttention(nn.Module):
    def __init__(self, card: ModelCard, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.head_dim, heads = layer_idx, card.head_dim, card.num_attention_heads
        self.nope, self.rope, self.value_dim = card.qk_nope_head_dim, card.qk_rope_head_dim, card.v_head_dim
        self.rank, self.scale = card.kv_lora_rank, _scale(card)
        self.form: Literal["expanded", "absorbed", "left"] = "expanded"  # of what `project` gives and `output` takes
        if card.q_lora_rank:
            self.q_a_proj = nn.Linear(card.hidden_size, card.q_lora_rank, bias=card.attention_bias)
            self.q_a_layernorm = RMSNorm(card.q_lora_rank, card.rms_norm_eps)
            self.q_b_proj = nn.Linear(card.q_lora_rank, heads * card.head_dim, bias=False)
        else:
            self.q_proj = nn.Linear(card.hidden_size, heads * card.head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(card.hidden_size, self.rank + self.rope, bias=card.attention_bias)
        self.kv_a_layernorm = RMSNorm(self.rank, card.rms_norm_eps)
        self.kv_b_proj = nn.Linear(self.rank, heads * (self.nope + self.value_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.value_dim, card.hidden_size, bias=card.attention_bias)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x [N, H] -> what `Attend` wants, with C numbers of the latent and R of the shared key in a token.

        Expanded: q and k [N, Hq, D], v [N, Hq, V]. Absorbed: q [N, Hq, C + R], k [N, 1, C + R], v [N, 1, C]. Left: q of
        the first form, k and v of the second.
        """
        q, latent, shared = self.compress(x, self.q_latent(x), cos, sin)
        if self.form == "left":
            return self.scaled(q), torch.cat([latent[:, None], shared], dim=-1), latent[:, None]
        return self.absorb(q, latent, shared) if self.form == "absorbed" else self.expand(q, latent, shared)

    def q_latent(self, x: Tensor) -> Tensor:
        """x [N, H] -> what queries are made from, [N, Q]; x itself where they have no latent."""
        return self.q_a_layernorm(self.q_a_proj(x)) if hasattr(self, "q_a_proj") else x

    def compress(self, x: Tensor, q_latent: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, H] -> q [N, Hq, D] turned, the latent [N, C] normed, the shared key [N, 1, R] turned."""
        q = self.q_b_proj(q_latent) if hasattr(self, "q_b_proj") else self.q_proj(q_latent)
        still, turning = q.view(len(x), -1, self.head_dim).split([self.nope, self.rope], dim=-1)
        q = torch.cat([still, rotate_pairs(turning, cos, sin)], dim=-1)
        latent, shared = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], dim=-1)
        return q, self.kv_a_layernorm(latent), rotate_pairs(shared[:, None], cos, sin)

    def expand(self, q: Tensor, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of every head; `Attend` scales by D ** -0.5."""
        parts = self.kv_b_proj(latent).view(len(latent), -1, self.nope + self.value_dim)
        k, v = parts.split([self.nope, self.value_dim], dim=-1)
        k = torch.cat([k, shared.expand(-1, k.shape[1], -1)], dim=-1)
        return self.scaled(q), k, v

    def scaled(self, q: Tensor) -> Tensor:
        return q if self.scale == 1.0 else q * self.scale

    def absorb(self, q: Tensor, latent: Tensor, shared: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the latent; `Attend` scales by (C + R) ** -0.5."""
        still, turning = q.split([self.nope, self.rope], dim=-1)
        q = torch.cat([torch.einsum("nhd,hdc->nhc", still, self.of_heads()[0]), turning], dim=-1)
        scale = self.scale * ((self.rank + self.rope) / self.head_dim) ** 0.5
        return q * scale, torch.cat([latent[:, None], shared], dim=-1), latent[:, None]

    def output(self, attended: Tensor) -> Tensor:
        """attended [N, Hq, V], absorbed [N, Hq, C] -> [N, H]."""
        if self.form == "absorbed":
            attended = torch.einsum("nhc,hvc->nhv", attended, self.of_heads()[1])
        return self.o_proj(attended.flatten(1))

    def of_heads(self) -> tuple[Tensor, Tensor]:
        """The matrices that make keys [Hq, D - R, C] and values [Hq, V, C] of the latent."""
        plain = type(self.kv_b_proj).forward is nn.Linear.forward  # and not one with adapters, or in FP8
        weight = self.kv_b_proj.weight if plain else self._measured()
        weight = weight.view(-1, self.nope + self.value_dim, self.rank)
        return weight[:, : self.nope], weight[:, self.nope :]

    def _measured(self) -> Tensor:
        """The matrix that kv_b_proj multiplies by: what it makes of the unit vectors."""
        weight = self.kv_b_proj.weight
        return self.kv_b_proj(torch.eye(self.rank, dtype=weight.dtype, device=weight.device)).t()


def _scale(card: ModelCard) -> float:
    """Of scores, besides D ** -0.5: the square of YaRN's temperature where it is the scores' and not cos and sin's."""
    scaling = card.rope_scaling
    if scaling is None or not scaling.mscale_all_dim:
        return 1.0
    return yarn_temperature(scaling.factor, scaling.mscale_all_dim) ** 2
