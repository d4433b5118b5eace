"""The experts of a layer, stacked, and their grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.models.by_hand import GroupedLinearByHand, SwiGLUByHand, by_hand, is_by_hand
from prl.models.experts.dispatch import ExpertCompute, LocalDispatch
from prl.models.sharding import local_part

# dispatch(x [N, H], weights [N, K], experts [N, K], num_experts, compute) -> [N, H]
Dispatch = Callable[[Tensor, Tensor, Tensor, int, ExpertCompute], Tensor]


class Experts(nn.Module):
    """Experts, stacked: SwiGLU ones of gate_up_proj [E, 2I, H] and down_proj [E, H, I]; those without a gate have
    up_proj [E, I, H] instead, and square what is positive.

    Under expert parallelism the parameters are DTensors over the expert group, and `dispatch` brings the tokens.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int, gated: bool = True) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first = "gate_up" if gated else "up"  # what the first stack is called
        rows = 2 * intermediate if gated else intermediate
        self.register_parameter(f"{self.first}_proj", nn.Parameter(torch.empty(num_experts, rows, hidden)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.dispatch: Dispatch = LocalDispatch()

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]."""
        return self.dispatch(x, weights, experts, self.num_experts, self.grouped_mlp)

    @property
    def first_proj(self) -> Tensor:
        """gate_up_proj, or up_proj."""
        return getattr(self, f"{self.first}_proj")

    def grouped_mlp(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        first, down = local_part(self.first_proj), local_part(self.down_proj)
        return grouped_linear(self.activate(grouped_linear(x, first, counts), scale), down, counts)

    def activate(self, x: Tensor, scale: Tensor) -> Tensor:
        """SwiGLU (arXiv:2002.05202) times scale [M]: [M, 2I] -> [M, I]; without a gate, the squared ReLU
        (arXiv:2109.08668): [M, I] -> [M, I].
        """
        if self.first == "up":
            return F.relu(x).square() * scale[:, None]
        if is_by_hand(x):
            return by_hand(SwiGLUByHand, x, scale)
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up * scale[:, None]


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M, K] in slices of counts [E] rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T, in x's dtype."""
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
        ends = counts.cumsum(0).to(torch.int32)
        if weight.dtype != x.dtype:
            return GroupedLinearOfWider.apply(x, weight, ends)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    weight = weight.to(x.dtype)
    if is_by_hand(x):
        return by_hand(GroupedLinearByHand, x, weight, counts.tolist())
    # float32, and a rank that no token chose: empty slices still give every weight its (zero) gradient
    slices = x.split(counts.tolist())
    return torch.cat([F.linear(rows, w) for rows, w in zip(slices, weight.unbind(), strict=True)])


class GroupedLinearOfWider(torch.autograd.Function):
    """As `grouped_linear` with slices that end at `ends` [E]; the weight is of a wider dtype than x, and cast once more
    in backward rather than kept: 2 bytes of each parameter of all layers' experts.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return F.grouped_mm(x, weight.to(x.dtype).transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = F.grouped_mm(grad, weight.to(x.dtype), offs=ends)
        if ctx.needs_input_grad[1]:
            d_weight = F.grouped_mm(grad.t(), x, offs=ends).to(weight.dtype)
        return d_x, d_weight, None
