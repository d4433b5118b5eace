"""Rows sorted by expert, laid out so that every expert's rows start at a multiple of 128.

Grouped GEMMs work on tiles of one expert each, and blocks of 128 tokens that share a scale must not cross experts. All
sizes come from shapes, so the host does not wait for the counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prl.models.fp8.format import BLOCK


@dataclass(frozen=True)
class GroupedRows:
    """M rows in E groups, padded to Mp rows; what lies behind the last group's padding belongs to nobody.

    Made by `group_rows`.
    """

    padded: int  # Mp
    source: Tensor  # [Mp] int64: which row lies there, -1 for padding
    target: Tensor  # [M] int64: where a row lies
    expert: Tensor  # [Mp] int32: whose row it is, padding included; -1 behind the last group
    sizes: Tensor  # [E] int32: rows of each group with its padding
    starts: Tensor  # [E] int32: first row of each group

    def source_of(self, padded: bool) -> Tensor:
        """`source` [Mp] where rows come in their own order or, `padded`, in this one already."""
        if not padded:
            return self.source
        return torch.arange(self.padded, device=self.source.device).where(self.source >= 0, -1)

    def pad(self, x: Tensor) -> Tensor:
        """x [M, H] -> [Mp, H], zeros for padding."""
        rows = x[self.source.clamp(min=0)] if len(x) else x.new_zeros(self.padded, x.shape[1])
        return rows * (self.source >= 0)[:, None]

    def unpad(self, x: Tensor) -> Tensor:
        """x [Mp, H] -> [M, H]."""
        return x[self.target]


def group_rows(counts: Tensor, num_rows: int) -> GroupedRows:
    """counts [E] of rows that are sorted by group, num_rows in all."""
    groups = counts.numel()
    padded = (num_rows + groups * (BLOCK - 1)) // BLOCK * BLOCK  # at least what the paddings can come to
    sizes = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends, padded_ends = counts.cumsum(0), sizes.cumsum(0)
    starts, padded_starts = ends - counts, padded_ends - sizes
    place = torch.arange(padded, device=counts.device)
    expert = torch.searchsorted(padded_ends, place, right=True)  # [Mp], E behind the last group
    inside = expert < groups
    group = expert.clamp(max=groups - 1)
    offset = place - padded_starts[group]
    source = torch.where(inside & (offset < counts[group]), starts[group] + offset, -1)
    row = torch.arange(num_rows, device=counts.device)
    owner = torch.searchsorted(ends, row, right=True).clamp(max=groups - 1)
    return GroupedRows(
        padded=padded,
        source=source,
        target=padded_starts[owner] + row - starts[owner],
        expert=torch.where(inside, expert, -1).int(),
        sizes=sizes.int(),
        starts=padded_starts.int(),
    )
