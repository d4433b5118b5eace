"""The experts of a layer, stacked, and their grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.models.by_hand import GroupedLinearByHand, SwiGLUByHand, by_hand, is_by_hand
from prl.models.experts.dispatch import ExpertWork, LocalDispatch, nothing
from prl.models.experts.gradients import add_gradient, adds_up
from prl.models.sharding import local_part

# dispatch(x [N, H], weights [N, K], experts [N, K], num_experts, work) -> [N, H]
Dispatch = Callable[[Tensor, Tensor, Tensor, int, ExpertWork], Tensor]


class Early:
    """What `make` makes, made before it is taken where there is time for it."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.made = make, None

    def begin(self) -> None:
        with torch.no_grad():
            self.made = self.make()

    def take(self) -> Any:
        """Once: then it is forgotten."""
        if self.made is None:
            self.begin()
        made, self.made = self.made, None
        return made


class Casts(NamedTuple):
    """Of a stack's weights, as its products read them."""

    forward: Early
    backward: Early


class Experts(nn.Module):
    """Experts, stacked: SwiGLU ones of gate_up_proj [E, 2I, H] and down_proj [E, H, I]; those without a gate have
    up_proj [E, I, H] instead, and square what is positive.

    Under expert parallelism the parameters are DTensors over the expert group, and `dispatch` brings the tokens.
    """

    alignment = 1  # of each expert's rows, as `grouped_mlp` wants them

    def __init__(self, num_experts: int, hidden: int, intermediate: int, gated: bool = True) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.first = "gate_up" if gated else "up"  # what the first stack is called
        rows = 2 * intermediate if gated else intermediate
        self.register_parameter(f"{self.first}_proj", nn.Parameter(torch.empty(num_experts, rows, hidden)))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.dispatch: Dispatch = LocalDispatch()
        self.casts: list[Casts | None] = [None, None]  # of the pass under way: of the first stack, and the second

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor, ahead: Callable[[], object] = nothing) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H].

        ahead: called once, for what else the device can do while tokens travel. Weights are cast then, too.
        """
        if not isinstance(self.dispatch, LocalDispatch):
            stacks = local_part(self.first_proj), local_part(self.down_proj)
            self.casts = [self.casts_of(stack.detach(), x.dtype) for stack in stacks]
        early = [casts for casts in self.casts if casts is not None]

        def forward() -> None:
            ahead()
            for casts in early:
                casts.forward.begin()

        def backward() -> None:
            for casts in reversed(early):
                casts.backward.begin()

        work = ExpertWork(self.grouped_mlp, self.alignment, forward, backward)
        y = self.dispatch(x, weights, experts, self.num_experts, work)
        self.casts = [None, None]
        return y

    def casts_of(self, weight: Tensor, dtype: torch.dtype) -> Casts | None:
        """Of a stack [E, out, in], for tokens in `dtype`; None where products read it as it is."""
        if weight.dtype == dtype or dtype != torch.bfloat16 or not weight.is_cuda:
            return None
        return Casts(*(Early(lambda: weight.to(dtype)) for _ in range(2)))

    @property
    def first_proj(self) -> Tensor:
        """gate_up_proj, or up_proj."""
        return getattr(self, f"{self.first}_proj")

    def grouped_mlp(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        of_first, of_down = self.casts
        hidden = self.activate(grouped_linear(x, self.first_proj, counts, of_first), scale)
        return grouped_linear(hidden, self.down_proj, counts, of_down)

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


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, casts: Casts | None = None) -> Tensor:
    """x [M, K] in slices of counts [E] rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T, in x's dtype.

    weight may be a DTensor of which these experts are held here. casts: of a wider weight to x's dtype.
    """
    param, weight = weight, local_part(weight)
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
        ends = counts.cumsum(0, dtype=torch.int32)
        if weight.dtype != x.dtype:
            early = casts or Casts(*(Early(lambda: weight.to(x.dtype)) for _ in range(2)))
            if adds_up(param, x):
                return GroupedLinearOfWider.apply(x, weight.detach(), ends, early, param)
            return GroupedLinearOfWider.apply(x, weight, ends, early, None)
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

    param: what the weight's gradient is added to, instead of being handed on (`adds_up`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor, casts: Casts, param: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, ends)  # the weight, so that a change in between is noticed
        ctx.casts, ctx.param = casts.backward, param
        return F.grouped_mm(x, casts.forward.take().transpose(1, 2), offs=ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, ends = ctx.saved_tensors
        grad = grads[0].contiguous()
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = F.grouped_mm(grad, ctx.casts.take(), offs=ends)
        if ctx.param is not None:
            add_gradient(ctx.param, lambda _: F.grouped_mm(grad.t(), x, offs=ends))
        elif ctx.needs_input_grad[1]:
            d_weight = F.grouped_mm(grad.t(), x, offs=ends).to(weight.dtype)
        return d_x, d_weight, None, None, None
