"""Qwen3 dense and Qwen3-MoE as one decoder, written for packed tokens.

Tokens of all sequences lie in one flat dimension [N]; what separates sequences is the `attend` callable, so that the
trainer (packed documents) and the built-in inference engine (KV cache) run exactly the same code and agree to
rounding. Architecture: Qwen3 technical report (arXiv:2505.09388); parameter names follow the Hugging Face
checkpoints, except that the experts of a layer are stacked (`experts.gate_up_proj` [E, 2I, H], `experts.down_proj`
[E, H, I]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.checkpoints.names import Region, locate, to_hf
from prl.models.experts.moe import ExpertLoad, Experts, RoutingRecorder, route

# attend(layer_idx, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]; q and k are already rotated
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rotary_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin, [N, 1, D] float32, for positions [N]; halves are laid out as in Hugging Face's rotate_half."""
    inv_freq = theta ** -(torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim)
    angles = positions.float()[:, None] * inv_freq  # [N, D/2]
    angles = torch.cat([angles, angles], dim=-1)[:, None, :]
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embedding (arXiv:2104.09864) to x [N, H, D]."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


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


class DenseMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, recorder: RoutingRecorder | None) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU (arXiv:2002.05202): gate and up [N, I] -> [N, I]."""
        return F.silu(gate) * up


class SparseMLP(nn.Module):
    """Top-k softmax router over stacked SwiGLU experts."""

    def __init__(self, card: ModelCard, layer_idx: int) -> None:
        super().__init__()
        self.layer_idx, self.top_k, self.norm_topk_prob = layer_idx, card.num_experts_per_tok, card.norm_topk_prob
        self.gate = nn.Linear(card.hidden_size, card.num_experts, bias=False)
        self.experts = Experts(card.num_experts, card.hidden_size, card.moe_intermediate_size)
        self.router_bias: Tensor | None
        self.register_buffer("router_bias", None)  # [E] float32 where training balances the load (ExpertBalance)
        self.load: ExpertLoad | None = None

    def forward(self, x: Tensor, recorder: RoutingRecorder | None) -> Tensor:
        replayed = recorder.replay(self.layer_idx) if recorder is not None else None
        weights, experts = self.route(x, replayed)
        if recorder is not None:
            recorder.record(self.layer_idx, experts)
        y = self.experts(x, weights, experts)
        return y if self.load is None else self.load.watch(self.layer_idx, y, experts)

    def route(self, x: Tensor, replayed: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [N, H] -> mixing weights [N, K], experts [N, K]."""
        return route(self.gate(x), self.top_k, self.norm_topk_prob, replayed, self.router_bias)


class DecoderLayer(nn.Module):
    """Attention block, then MLP block, each with its residual. The blocks are methods of their own, and the parts that
    run no attention kernel and no communication (`project`, `join`) too, so that checkpointing and compilation can
    wrap exactly them.
    """

    def __init__(self, card: ModelCard, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(card.hidden_size, card.rms_norm_eps)
        self.self_attn = Attention(card, layer_idx)
        self.post_attention_layernorm = RMSNorm(card.hidden_size, card.rms_norm_eps)
        sparse = layer_idx in card.sparse_layers
        self.mlp = SparseMLP(card, layer_idx) if sparse else DenseMLP(card.hidden_size, card.intermediate_size)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, recorder: RoutingRecorder | None) -> Tensor:
        return self.mlp_block(self.attention_block(x, cos, sin, attend), recorder)

    def attention_block(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        q, k, v = self.project(x, cos, sin)
        return self.join(x, attend(self.self_attn.layer_idx, q, k, v))

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def join(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.self_attn.o_proj(attended.flatten(1))

    def mlp_block(self, x: Tensor, recorder: RoutingRecorder | None) -> Tensor:
        return x + self.mlp(self.post_attention_layernorm(x), recorder)


class Qwen3Model(nn.Module):
    """Decoder with LM head. Built on the meta device by `prl.models.checkpoints.checkpoint`, then loaded.

    forward: input_ids [N] int64, positions [N] int64, attend as above -> hidden [N, H] after the final norm; with
    `head`, its result instead. `head(hidden [N, H], weight [V, H])` runs inside forward because under FSDP the LM
    head's weight is whole only there.
    """

    def __init__(self, card: ModelCard) -> None:
        super().__init__()
        self.card = card
        self.embed_tokens = nn.Embedding(card.vocab_size, card.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(card, i) for i in range(card.num_hidden_layers))
        self.norm = RMSNorm(card.hidden_size, card.rms_norm_eps)
        self.lm_head = None if card.tie_word_embeddings else nn.Linear(card.hidden_size, card.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        return self.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attend: Attend,
        head: Callable[[Tensor, Tensor], Tensor | tuple[Tensor, ...]] | None = None,
        recorder: RoutingRecorder | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        x = self.embed_tokens(input_ids)
        cos, sin = rotary_tables(positions, self.card.head_dim, self.card.rope_theta)
        for layer in self.layers:
            x = layer(x, cos, sin, attend, recorder)
        x = self.norm(x)
        return x if head is None else head(x, self.head_weight)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> logits [N, V]; only for models that are not sharded."""
        return F.linear(hidden, self.head_weight)

    def locate(self, hf_name: str) -> Region | None:
        """The region that a checkpoint tensor fills; None for one that this model does not hold."""
        return locate(hf_name, self.card)

    def to_hf(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """One whole parameter -> its checkpoint tensors (views)."""
        return to_hf(name, tensor, self.card)

    def checkpoint_buffers(self) -> dict[str, Tensor]:
        """Buffers that are part of Hugging Face checkpoints: none."""
        return {}

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator, std: float = 0.02) -> None:
        """Normal(0, std) for matrices, ones for norms; the same numbers for the same generator state on every
        platform's CPU.
        """
        for name, param in self.named_parameters():
            if name.endswith("norm.weight"):
                param.fill_(1.0)
            else:
                param.normal_(0.0, std, generator=generator)
