"""Expert parallelism by all-to-all: tokens travel to the ranks that hold their experts, and back.

Each rank of an expert group of `ep` ranks holds E / ep neighbouring experts (GShard, arXiv:2006.16668; dropless as in
MegaBlocks, arXiv:2211.15841: every token reaches all its experts, whatever the load).

Mixing weights travel with their tokens and are applied by the experts, inside the activation: what comes back is only
added up, so the experts' outputs [N*K, H] need not be kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

# compute(x [M, H] sorted by local expert, counts [E_local], scale [M]) -> scale * expert(x), [M, H]
ExpertCompute = Callable[[Tensor, Tensor, Tensor], Tensor]


class LocalDispatch:
    """All experts are here."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: ExpertCompute) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]: the weighted sum of each token's experts."""
        order, positions, counts = sort_by_expert(experts, num_experts)
        scale = spread(weights.flatten(), order, positions.view(-1, 1))
        return collect(compute(spread(x, order, positions), counts, scale), order, positions)


class AllToAllDispatch:
    """Experts are spread over `group`; one host synchronisation per call, for the split sizes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.size = group, group.size()

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: ExpertCompute) -> Tensor:
        """As `LocalDispatch`; `compute` sees the tokens of all ranks that chose this rank's experts."""
        order, positions, counts = sort_by_expert(experts, num_experts)
        sent = counts.view(self.size, -1)  # [ep, E_local]: to which rank, for which of its experts
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        sizes = HostCopy(torch.stack([sent.sum(1), received.sum(1)]))
        # the device sorts rows while the host waits for the sizes
        rows, scale = spread(x, order, positions), spread(weights.flatten(), order, positions.view(-1, 1))
        out, back = sizes.wait()
        by_expert, by_rank = regroup(received, sum(back))
        rows, scale = (AllToAll.apply(part, out, back, self.group) for part in (rows, scale))
        rows, scale = (spread(part, by_expert, by_rank[:, None]) for part in (rows, scale))
        rows = compute(rows, received.sum(0), scale)
        rows = AllToAll.apply(spread(rows, by_rank, by_expert[:, None]), back, out, self.group)
        return collect(rows, order, positions)


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


class HostCopy:
    """A small device tensor on its way to the host, so that the device can be given work before the host waits."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to("cpu", non_blocking=True)  # into pinned memory
        self.arrived = torch.cuda.Event() if values.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> list[list[int]]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()


# --- who goes where ---------------------------------------------------------------------------------------------------


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments [N, K] grouped by expert. The host does not wait.

    Returns order [N*K] (the assignments' flat indices, in token order within an expert), its inverse positions [N, K],
    and the tokens per expert [E].
    """
    keys = experts.flatten().to(torch.int16)  # a radix sort of a quarter of the bits
    ordered, order = keys.sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device, dtype=torch.int16)
    return order, invert(order).view(experts.shape), torch.searchsorted(ordered, bounds).diff()


def regroup(received: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """[ep, E_local] counts of rows that arrived rank by rank -> by_expert [total], the row to take at each place of
    the order by expert, and its inverse by_rank [total].
    """
    by_rank = starts(received)
    shift = starts(received.T).T - by_rank  # how far each (rank, expert) block moves
    rows = torch.arange(total, device=received.device)
    there = torch.repeat_interleave(shift.flatten(), received.flatten(), output_size=total)
    back = torch.repeat_interleave(shift.T.flatten(), received.T.flatten(), output_size=total)
    return rows - back, rows + there


def starts(sizes: Tensor) -> Tensor:
    """Sizes [A, B] of blocks that lie one after another, row by row -> where each begins [A, B]."""
    flat = sizes.flatten()
    return (flat.cumsum(0) - flat).view(sizes.shape)


def invert(permutation: Tensor) -> Tensor:
    positions = torch.arange(permutation.numel(), device=permutation.device)
    return torch.empty_like(permutation).scatter_(0, permutation, positions)


# --- moving rows ------------------------------------------------------------------------------------------------------


def spread(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Rows x [N, ...] of tokens -> rows [M, ...] of their assignments: row m is that of token order[m] // K.

    positions [N, K] is the inverse: where each assignment went, or -1 if nowhere. Backward sums each token's rows by a
    gather, not by atomics as the backward of indexing does, so the order of the sum (and its rounding) is fixed.
    """
    return Spread.apply(x, order, positions)


def collect(rows: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Rows [M, ...] of assignments -> the sum over each token's [N, ...]; the transpose of `spread`."""
    return Collect.apply(rows, order, positions)


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(order, positions)
        return copy_rows(x, order, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return sum_rows(grads[0], *ctx.saved_tensors), None, None


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, positions: Tensor) -> Tensor:
        ctx.save_for_backward(order, positions)
        return sum_rows(rows, order, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return copy_rows(grads[0], *ctx.saved_tensors), None, None


def copy_rows(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """What `spread` computes."""
    if x.is_cuda and x.dim() == 2:
        from prl.models.row_kernels import scatter

        return scatter(x, positions, len(order))
    return x.index_select(0, order // positions.shape[1])


def sum_rows(rows: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """What `collect` computes."""
    if rows.is_cuda and rows.dim() == 2:
        from prl.models.row_kernels import gather_sum

        return gather_sum(rows, positions)
    if len(order) == positions.numel():
        return rows[positions].sum(dim=1)
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])  # position -1 is this last row
    return padded[positions].sum(dim=1)
