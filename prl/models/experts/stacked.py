"""The experts of a layer, stacked, and their grouped matrix products."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prl.models.experts.dispatch import ExpertCompute, LocalDispatch
from prl.models.sharding import local_part

# dispatch(x [N, H], weights [N, K], experts [N, K], num_experts, compute) -> [N, H]
Dispatch = Callable[[Tensor, Tensor, Tensor, int, ExpertCompute], Tensor]


class Experts(nn.Module):
    """SwiGLU experts, stacked: gate_up_proj [E, 2I, H], down_proj [E, H, I].

    Under expert parallelism the parameters are DTensors over the expert group, and `dispatch` brings the tokens.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.dispatch: Dispatch = LocalDispatch()

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]."""
        return self.dispatch(x, weights, experts, self.num_experts, self.grouped_swiglu)

    def grouped_swiglu(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        gate_up, down = local_part(self.gate_up_proj), local_part(self.down_proj)
        return grouped_linear(self.activate(grouped_linear(x, gate_up, counts), scale), down, counts)

    def activate(self, gate_up: Tensor, scale: Tensor) -> Tensor:
        """SwiGLU (arXiv:2002.05202) times scale [M]: [M, 2I] -> [M, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up * scale[:, None]


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M, K] in slices of counts [E] rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T."""
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    # float32, and a rank that no token chose: empty slices still give every weight its (zero) gradient
    slices = x.split(counts.tolist())
    return torch.cat([F.linear(rows, w) for rows, w in zip(slices, weight.unbind(), strict=True)])
