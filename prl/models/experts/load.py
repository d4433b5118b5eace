"""How many tokens each expert has seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ExpertLoad:
    """Tokens per expert of each layer, `counts` [L, E] int64, added up on the device until it is cleared.

    A forward pass counts when its backward comes by: once however often activation checkpointing repeats the forward,
    and never in evaluation. The host does not wait.
    """

    def __init__(self, num_layers: int, num_experts: int, device: torch.device) -> None:
        self.counts = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=device)
        self.times: Tensor | None = None  # [N] int64: how often tokens of the coming forward pass count; None: once
        self.counting = True  # whether the coming forward pass counts at all

    def watch(self, layer_idx: int, y: Tensor, experts: Tensor) -> Tensor:
        """y [N, H], the layer's output for tokens routed to experts [N, K], unchanged."""
        if not (self.counting and y.requires_grad):
            return y
        times = torch.ones_like(experts) if self.times is None else self.times.to(experts.dtype)[:, None]
        counts = torch.zeros_like(self.counts[layer_idx])
        counts.scatter_add_(0, experts.flatten(), times.expand_as(experts).flatten())
        return CountInBackward.apply(y, counts, self.counts[layer_idx])


class CountInBackward(torch.autograd.Function):
    """y as it is; its backward adds `counts` [E] to `total` [E]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, counts: Tensor, total: Tensor) -> Tensor:
        ctx.counts, ctx.total = counts, total  # not saved tensors, which checkpointing would recompute
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.total.add_(ctx.counts)
        return grads[0], None, None
