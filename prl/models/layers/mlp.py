"""What follows attention in a layer: one MLP, or experts behind a router."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.config.schema import ModelCard
from prl.models.experts.load import ExpertLoad
from prl.models.experts.routing import Choice, Router, RoutingRecorder, route
from prl.models.experts.stacked import Experts


class DenseMLP(nn.Module):
    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, recorder: RoutingRecorder | None = None) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x), self.up_proj(x)))

    def activate(self, gate: Tensor, up: Tensor) -> Tensor:
        """SwiGLU (arXiv:2002.05202): gate and up [N, I] -> [N, I]."""
        return F.silu(gate) * up


class SquaredReluMLP(DenseMLP):
    """Of two matrices, without a gate (Primer, arXiv:2109.08668)."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        nn.Module.__init__(self)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, recorder: RoutingRecorder | None = None) -> Tensor:
        return self.down_proj(self.activate(self.up_proj(x)))

    def activate(self, up: Tensor) -> Tensor:  # type: ignore[override]
        """[N, I] -> [N, I]."""
        return F.relu(up).square()


class SparseMLP(nn.Module):
    """A router over stacked experts, and experts that every token sees. Between two projections the stacked ones may
    work on latents (`moe_latent_size`), which neither router nor shared experts do.

    `router_bias` [E] float32 is added to the scores for the choice alone: a buffer that checkpoints have
    (`corrected`), or one that training adds to balance the load (ExpertBalance).
    """

    def __init__(
        self, card: ModelCard, layer_idx: int, choice: Choice, corrected: bool = False, gated: bool = True
    ) -> None:
        super().__init__()
        self.layer_idx, self.choice, self.corrected = layer_idx, choice, corrected
        router = Router if card.router_dtype == "float32" else nn.Linear
        self.gate = router(card.hidden_size, card.num_experts, bias=False)
        self.has_latents = card.moe_latent_size > 0
        width = card.expert_width
        if self.has_latents:
            self.fc1_latent_proj = nn.Linear(card.hidden_size, width, bias=False)
            self.fc2_latent_proj = nn.Linear(width, card.hidden_size, bias=False)
        self.experts = Experts(card.num_experts, width, card.moe_intermediate_size, gated)
        dense, shared = (DenseMLP if gated else SquaredReluMLP), card.shared_intermediate_size
        self.shared_experts = dense(card.hidden_size, shared) if shared else None
        self.router_bias: Tensor | None
        self.register_buffer("router_bias", torch.zeros(card.num_experts) if corrected else None)
        self.load: ExpertLoad | None = None

    def forward(self, x: Tensor, recorder: RoutingRecorder | None) -> Tensor:
        replayed = recorder.replay(self.layer_idx) if recorder is not None else None
        weights, experts = self.route(x, replayed)
        if recorder is not None:
            recorder.record(self.layer_idx, experts)
        shared: list[Tensor] = []

        def share() -> None:
            """While tokens travel to their experts."""
            if self.shared_experts is not None:
                shared.append(self.shared_experts(x))

        y = self.experts(self.fc1_latent_proj(x) if self.has_latents else x, weights, experts, share)
        if self.has_latents:
            y = self.fc2_latent_proj(y)
        if shared:
            y = y + shared[0]
        return y if self.load is None else self.load.watch(self.layer_idx, y, experts)

    def route(self, x: Tensor, replayed: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [N, H] -> mixing weights [N, K], experts [N, K]."""
        weights, experts = route(self.gate(x), self.choice, replayed, self.router_bias)
        return weights.to(x.dtype), experts
