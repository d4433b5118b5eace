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
    """Mp rows in E groups; what lies behind the last group's padding belongs to nobody.

    Made by `group_rows`.
    """

    source: Tensor  # [Mp] int64: each row itself, -1 for padding: those to take when casting
    expert: Tensor  # [Mp] int32: whose row it is, padding included; -1 behind the last group
    sizes: Tensor  # [E] int32: rows of each group with its padding
    starts: Tensor  # [E] int32: first row of each group


def group_rows(counts: Tensor, num_rows: int) -> GroupedRows:
    """counts [E] of rows in groups that begin at multiples of 128, num_rows in all, a multiple of 128."""
    if counts.is_cuda:
        from prl.models.fp8.expert_kernels import lay_out_groups

        return GroupedRows(*lay_out_groups(counts, num_rows))
    sizes = (counts + BLOCK - 1) // BLOCK * BLOCK
    ends = sizes.cumsum(0)
    starts = ends - sizes
    row = torch.arange(num_rows)
    expert = torch.searchsorted(ends, row, right=True)  # [Mp], E behind the last group
    inside = expert < len(counts)
    group = expert.clamp(max=len(counts) - 1)
    return GroupedRows(
        source=row.where(inside & (row - starts[group] < counts[group]), -1),
        expert=torch.where(inside, expert, -1).int(),
        sizes=sizes.int(),
        starts=starts.int(),
    )
