"""Where a tensor of a checkpoint lies in a model."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Region:
    """Where one Hugging Face tensor lies inside one of our parameters.

    `expert` is the index along dimension 0 (None: there is no such dimension), `rows` the range along the dimension
    behind it (None: all).
    """

    param: str
    expert: int | None = None
    rows: tuple[int, int] | None = None


def cut(region: Region, whole: Tensor) -> Tensor:
    """The tensor of a checkpoint that fills `region`, as a view of the whole parameter."""
    part = whole if region.expert is None else whole[region.expert]
    return part if region.rows is None else part[slice(*region.rows)]
