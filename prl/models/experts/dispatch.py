"""Bringing tokens to their experts, and what these make of them back: dropless, as in MegaBlocks (arXiv:2211.15841),
every token reaches all its experts, whatever the load.

Mixing weights go with their tokens and are applied by the experts, inside the activation: what comes back is only added
up, so the experts' outputs [N*K, H] need not be kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
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


# --- who goes where ---------------------------------------------------------------------------------------------------


def sort_by_expert(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assignments [N, K] grouped by expert. The host does not wait.

    Returns order [N*K] (the assignments' flat indices, in token order within an expert), its inverse positions [N, K],
    and the tokens per expert [E].
    """
    keys = experts.flatten().to(torch.int16)  # a radix sort of a quarter of the bits
    ordered, order = keys.sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=experts.device, dtype=torch.int16)
    return order, invert(order, len(order)).view(experts.shape), torch.searchsorted(ordered, bounds).diff()


def invert(places: Tensor, size: int) -> Tensor:
    """Places [...] within `size`, each taken once, or -1 -> [size]: the flat index of each place's taker, 0: nobody."""
    places = places.flatten()
    takers = torch.zeros(size + 1, dtype=torch.int64, device=places.device)  # the last is for the -1
    return takers.scatter_(0, places.where(places >= 0, size), torch.arange(len(places), device=places.device))[:size]


# --- moving rows ------------------------------------------------------------------------------------------------------


def spread(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """Rows x [N, ...] of tokens -> rows [M, ...] of their assignments: row m is that of token order[m] // K.

    positions [N, K] is the inverse: where each assignment went, or -1 if nowhere. Backward sums each token's rows by a
    gather, not by atomics as the backward of indexing does, so the order of the sum (and its rounding) is fixed.
    """
    return Spread.apply(x, order, positions)


def collect(rows: Tensor, order: Tensor, positions: Tensor, keep: bool = False) -> Tensor:
    """Rows [M, ...] of assignments -> the sum over each token's [N, ...]; the transpose of `spread`.

    keep: activation checkpointing is not to make order and positions again, so that it can stop before it has `rows`.
    """
    return Collect.apply(rows, order, positions, keep)


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
    def forward(ctx: Any, rows: Tensor, order: Tensor, positions: Tensor, keep: bool) -> Tensor:
        ctx.kept = (order, positions) if keep else None
        if not keep:
            ctx.save_for_backward(order, positions)
        return sum_rows(rows, order, positions)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return copy_rows(grads[0], *(ctx.kept or ctx.saved_tensors)), None, None, None


def copy_rows(x: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """What `spread` computes."""
    if x.is_cuda and x.dim() == 2:
        from prl.models.experts.row_kernels import scatter

        return scatter(x, positions, len(order))
    return x.index_select(0, order // positions.shape[1])


def sum_rows(rows: Tensor, order: Tensor, positions: Tensor) -> Tensor:
    """What `collect` computes."""
    if rows.is_cuda and rows.dim() == 2:
        from prl.models.experts.row_kernels import gather_sum

        return gather_sum(rows, positions)
    if not positions.is_cuda and bool((positions >= 0).all()):  # the host may look
        if rows.dim() == 2 and rows.dtype == torch.float32:
            return F.embedding_bag(positions, rows, mode="sum")  # one pass over memory
        return rows[positions].sum(dim=1)
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])  # position -1 is this last row
    return padded[positions].sum(dim=1)
