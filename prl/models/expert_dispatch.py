"""Expert parallelism by all-to-all: tokens travel to the ranks that hold their experts, and back.

Each rank of an expert group of `ep` ranks holds E / ep neighbouring experts (GShard, arXiv:2006.16668; dropless as in
MegaBlocks, arXiv:2211.15841: every token reaches all its experts, whatever the load).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# compute(x [M, H] sorted by local expert, counts [E_local]) -> [M, H]
ExpertCompute = Callable[[Tensor, Tensor], Tensor]


class LocalDispatch:
    """All experts are here."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: ExpertCompute) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]: the weighted sum of each token's experts."""
        order, counts = sort_by_expert(experts, num_experts)
        y = compute(x[order // experts.shape[1]], counts)
        return combine(y, weights, order)


class AllToAllDispatch:
    """Experts are spread over `group`; one host synchronisation per call, for the split sizes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: ExpertCompute) -> Tensor:
        """As `LocalDispatch`; `compute` sees the tokens of all ranks that chose this rank's experts."""
        order, counts = sort_by_expert(experts, num_experts)
        sent = counts.view(self.size, -1)  # [ep, E_local]: to which rank, for which of its experts
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        splits = torch.stack([sent.sum(1), received.sum(1)]).tolist()
        rows = AllToAll.apply(x[order // experts.shape[1]], splits[0], splits[1], self.group)
        by_expert = regroup(received, sum(splits[1]))
        y = compute(rows[by_expert], received.sum(0))
        y = AllToAll.apply(y[invert(by_expert)], splits[1], splits[0], self.group)
        return combine(y, weights, order)


class AllToAll(torch.autograd.Function):
    """Rows of x [M, ...] to the ranks of `group`, `sent[i]` of them to rank i; backward is the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.args = (received, sent, group)
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return AllToAll.apply(grads[0], *ctx.args), None, None, None


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Assignments [N, K] -> their indices grouped by expert [N*K], tokens per expert [E]. The host does not wait."""
    ordered, order = experts.flatten().sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device)
    return order, torch.searchsorted(ordered, bounds).diff()


def regroup(received: Tensor, total: int) -> Tensor:
    """[ep, E_local] counts of rows that arrived rank by rank -> indices [total] that group them by expert."""
    ranks, local = received.shape
    expert = torch.arange(local, device=received.device).repeat(ranks)
    return torch.repeat_interleave(expert, received.flatten(), output_size=total).argsort(stable=True)


def invert(permutation: Tensor) -> Tensor:
    positions = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, positions)


def combine(y: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Expert outputs [N*K, H] in `order`, mixing weights [N, K] -> [N, H].

    Results return to their token by a gather, not by atomics, so the sum's order (and its rounding) is fixed.
    """
    y = y * weights.flatten()[order, None]
    return y[invert(order)].view(*weights.shape, -1).sum(dim=1)
