"""Mixture of experts: routing, stacked experts, and the record of which expert saw which token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from prl.models.expert_dispatch import AllToAllDispatch, LocalDispatch


class RoutingRecorder:
    """Collects the top-k expert indices of a forward pass, or replays given ones (R3, arXiv:2510.11370).

    `experts[layer]` is [N, K] int64. With `given` [N, L, K], the router's choice is replaced layer by layer; the mixing
    weights are still computed from the current router logits, so gradients flow to the router.
    """

    def __init__(self, given: Tensor | None = None) -> None:
        self.experts: dict[int, Tensor] = {}
        self.given = given

    def record(self, layer_idx: int, experts: Tensor) -> None:
        self.experts[layer_idx] = experts

    def replay(self, layer_idx: int) -> Tensor | None:
        return None if self.given is None else self.given[:, layer_idx].long()

    def stacked(self) -> Tensor:
        """[N, L, K] uint8 (at most 256 experts) of the layers seen, in layer order."""
        return torch.stack([self.experts[i] for i in sorted(self.experts)], dim=1).to(torch.uint8)


def route(logits: Tensor, top_k: int, norm_topk_prob: bool, replayed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Router logits [N, E] -> mixing weights [N, K] in the logits' dtype, expert indices [N, K] int64."""
    probs = logits.float().softmax(dim=-1)
    if replayed is None:
        weights, experts = probs.topk(top_k, dim=-1)
    else:
        weights, experts = probs.gather(-1, replayed), replayed
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype), experts


class Experts(nn.Module):
    """SwiGLU experts, stacked: gate_up_proj [E, 2I, H], down_proj [E, H, I].

    Under expert parallelism the parameters are DTensors over the expert group, and `dispatch` brings the tokens.
    """

    def __init__(self, num_experts: int, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, intermediate))
        self.dispatch: LocalDispatch | AllToAllDispatch = LocalDispatch()

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]."""
        return self.dispatch(x, weights, experts, self.num_experts, self.grouped_swiglu)

    def grouped_swiglu(self, x: Tensor, counts: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local] -> [M, H]."""
        gate_up, down = local_part(self.gate_up_proj), local_part(self.down_proj)
        return grouped_linear(self.activate(grouped_linear(x, gate_up, counts)), down, counts)

    def activate(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (arXiv:2002.05202): [M, 2I] -> [M, I]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


def local_part(param: Tensor) -> Tensor:
    return param.to_local() if isinstance(param, DTensor) else param


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x [M, K] in slices of counts [E] rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T."""
    if x.is_cuda and x.dtype == torch.bfloat16 and x.shape[0] > 0:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    # float32, and a rank that no token chose: empty slices still give every weight its (zero) gradient
    slices = x.split(counts.tolist())
    return torch.cat([F.linear(rows, w) for rows, w in zip(slices, weight.unbind(), strict=True)])
