"""Where the assignments of tokens to experts lie among the rows that experts multiply: sorted by expert, in the tokens'
order within each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Places(NamedTuple):
    """Where each token's rows lie.

    positions [N, K] int64: for each of a token's K assignments the row, or -1: nowhere. num_rows: M, of which those
    that are nobody's (padding) hold anything. order [M] int64: the flat index into positions of each row, 0 for
    nobody's; kernels do without (None on GPUs).
    """

    positions: Tensor
    num_rows: int
    order: Tensor | None


def place(experts: Tensor, first: int, held: int, num_assignments: int, alignment: int = 1) -> tuple[Places, Tensor]:
    """Chosen experts [R, K], any integers, of which `held` beginning with `first` are here -> the rows of their
    assignments, and how many each expert here has [held] int64. The host does not wait.

    num_assignments: how many are here, at most. alignment: each expert's rows begin at a multiple of it; then there are
    as many rows as paddings can come to.
    """
    num_rows = (num_assignments + held * (alignment - 1)) // alignment * alignment
    if experts.is_cuda:
        from prl.models.experts.placement_kernels import place_assignments

        positions, counts = place_assignments(experts, first, held, alignment)
        return Places(positions, num_rows, None), counts
    local = experts - first
    away = (local < 0) | (local >= held)
    keys = local.masked_fill(away, held).flatten().to(torch.int16)  # a radix sort of a quarter of the bits
    ordered, order = keys.sort(stable=True)
    counts = torch.searchsorted(ordered, torch.arange(held + 1, dtype=torch.int16)).diff()
    positions = invert(order, len(order)).view(experts.shape)
    if alignment > 1:
        padding = -counts % alignment
        positions += torch.cat([padding.cumsum(0) - padding, padding.new_zeros(1)])[keys.long()].view(experts.shape)
    positions = positions.masked_fill_(away, -1)
    return Places(positions, num_rows, invert(positions, num_rows) if alignment > 1 else order[:num_rows]), counts


def invert(places: Tensor, size: int) -> Tensor:
    """Places [...] within `size`, each taken once, or -1 -> [size]: the flat index of each place's taker, 0: nobody."""
    places = places.flatten()
    takers = torch.zeros(size + 1, dtype=torch.int64, device=places.device)  # the last is for the -1
    return takers.scatter_(0, places.where(places >= 0, size), torch.arange(len(places), device=places.device))[:size]
