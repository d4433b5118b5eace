"""Bringing tokens to their experts, and what these make of them back: dropless, as in MegaBlocks (arXiv:2211.15841),
every token reaches all its experts, whatever the load.

Mixing weights go with their tokens and are applied by the experts, inside the activation: what comes back is only added
up, so the experts' outputs [N*K, H] need not be kept for backward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.models.experts.placement import Places, place

# compute(x [M, H] sorted by local expert, counts [E_local], scale [M]) -> scale * expert(x), [M, H]; where experts want
# their rows aligned (`placement.place`), what lies in rows of padding is anything in x, and finite in scale
ExpertCompute = Callable[[Tensor, Tensor, Tensor], Tensor]


def nothing() -> None:
    """No work."""


@dataclass(frozen=True)
class ExpertWork:
    """What tokens are dispatched for.

    alignment: of each expert's rows, as `compute` wants them. ahead: called once, for what else the device can do while
    rows are on their way to the experts; behind: the same in backward, while gradients are.
    """

    compute: ExpertCompute
    alignment: int = 1
    ahead: Callable[[], object] = nothing
    behind: Callable[[], object] = nothing


class LocalDispatch:
    """All experts are here."""

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, work: ExpertWork) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]: the weighted sum of each token's experts."""
        work.ahead()
        places, counts = place(experts, 0, num_experts, experts.numel(), work.alignment)
        scale = spread_scalars(weights, places)
        return collect(work.compute(spread(x, places), counts, scale), places)


# --- moving rows ------------------------------------------------------------------------------------------------------


def spread(x: Tensor, places: Places) -> Tensor:
    """Rows x [N, ...] of tokens -> rows [M, ...] of their assignments; rows of padding hold anything.

    Backward sums each token's rows by a gather, not by atomics as the backward of indexing does, so the order of the
    sum (and its rounding) is fixed.
    """
    return Spread.apply(x, places)


def collect(rows: Tensor, places: Places, keep: bool = False) -> Tensor:
    """Rows [M, ...] of assignments -> the sum over each token's [N, ...]; the transpose of `spread`.

    keep: activation checkpointing is not to make the places again, so that it can stop before it has `rows`.
    """
    return Collect.apply(rows, places, keep)


def spread_scalars(values: Tensor, places: Places) -> Tensor:
    """One value of each assignment [N, K] -> [M]; in rows of padding 0."""
    return SpreadScalars.apply(values, places)


class Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        save_places(ctx, places)
        return copy_rows(x, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grads[0], saved_places(ctx)), None


class Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Places, keep: bool) -> Tensor:
        ctx.kept = places if keep else None
        if not keep:
            save_places(ctx, places)
        return sum_rows(rows, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return copy_rows(grads[0], ctx.kept or saved_places(ctx)), None, None


class SpreadScalars(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, places: Places) -> Tensor:
        save_places(ctx, places)
        if places.order is None:
            from prl.models.experts.row_kernels import scatter_scalars

            return scatter_scalars(values, places.positions, places.num_rows)
        flat = places.positions.flatten()
        spread = values.new_zeros(places.num_rows + 1)  # the last is for what goes nowhere
        return spread.scatter_(0, flat.where(flat >= 0, places.num_rows), values.flatten())[:-1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad, positions = grads[0], saved_places(ctx).positions
        if grad.is_cuda:
            from prl.models.experts.row_kernels import gather_scalars

            return gather_scalars(grad, positions), None
        return torch.cat([grad, grad.new_zeros(1)])[positions], None  # position -1 is this last one


def save_places(ctx: Any, places: Places) -> None:
    ctx.num_rows = places.num_rows
    ctx.save_for_backward(places.positions, places.order)


def saved_places(ctx: Any) -> Places:
    positions, order = ctx.saved_tensors
    return Places(positions, ctx.num_rows, order)


def copy_rows(x: Tensor, places: Places) -> Tensor:
    """What `spread` computes."""
    if places.order is None:
        from prl.models.experts.row_kernels import scatter

        return scatter(x, places.positions, places.num_rows)
    if not len(x):
        return x.new_zeros(places.num_rows, *x.shape[1:])  # all is padding
    return x.index_select(0, places.order // places.positions.shape[1])


def sum_rows(rows: Tensor, places: Places) -> Tensor:
    """What `collect` computes."""
    positions = places.positions
    if places.order is None:
        from prl.models.experts.row_kernels import gather_sum

        return gather_sum(rows, positions)
    if bool((positions >= 0).all()):  # on the host, which may look
        if rows.dim() == 2 and rows.dtype == torch.float32:
            return F.embedding_bag(positions, rows, mode="sum")  # one pass over memory
        return rows[positions].sum(dim=1)
    padded = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])  # position -1 is this last row
    return padded[positions].sum(dim=1)
