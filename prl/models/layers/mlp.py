"""What follows attention in a layer: one MLP, or experts behind a router."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.experts.load import ExpertLoad
from prl.models.experts.routing import RoutingRecorder, route
from prl.models.experts.stacked import Experts


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
