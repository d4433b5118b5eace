"""Weights for engines that hold matrices in blocks of e4m3 (`prl/config/block_fp8.py`): quantised before they travel.

The numbers are those that training in FP8 multiplies by (`prl/models/fp8/cast.py`), from weights rounded to the dtype
in which they would travel else. Of a parameter that several ranks hold, a block may lie on two of them: each finds the
largest magnitudes in its part, the largest of all ranks make the scales, and each casts its part by these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.block_fp8 import BLOCK, SCALE, is_quantised
from prl.models.fp8.cast import cast_blocks, quantise, restore_blocks
from prl.models.fp8.format import E4M3_MAX, SMALLEST, Scaled

E4M3 = torch.float8_e4m3fn
AT_ONCE = 1 << 26  # numbers
NamedTensors = Iterable[tuple[str, Tensor]]


class Run(NamedTuple):
    """Rows `first` to `end` of a parameter, whose blocks are counted from `block`."""

    first: int
    end: int
    block: int


@dataclass(frozen=True)
class Grid:
    """The blocks of one parameter [..., N, K]: [..., ceil(N / 128), ceil(K / 128)].

    cuts: the rows at which its tensors begin, where one does so in the middle of a block; then blocks begin anew there.
    """

    whole: tuple[int, ...]
    cuts: tuple[int, ...] = (0,)

    @cached_property
    def runs(self) -> list[Run]:
        found, block = [], 0
        for first, end in pairwise((*self.cuts, self.whole[-2])):
            found.append(Run(first, end, block))
            block += -(-(end - first) // BLOCK)
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, _, columns = self.whole
        last = self.runs[-1]
        return (*lead, last.block + -(-(last.end - last.first) // BLOCK), -(-columns // BLOCK))

    @property
    def size(self) -> int:
        return prod(self.shape)

    @staticmethod
    def of(views: NamedTensors, whole: torch.Size) -> Grid | None:
        """`views`: the checkpoint's tensors of a parameter of this shape. None where it travels as it is: by its name,
        or because a tensor within it begins at a column in the middle of a block.
        """
        if len(whole) < 2:
            return None
        rows = {0}
        for name, view in views:
            *_, row, column = place_in(view, whole)
            if not is_quantised(name) or view.ndim != 2 or column % BLOCK:
                return None
            rows.add(row)
        return Grid(tuple(whole), tuple(sorted(rows)) if any(row % BLOCK for row in rows) else (0,))

    def blocks_of(self, view: Tensor) -> tuple[int | slice, ...]:
        """Which of the grid belong to a tensor that is this `view` of the parameter."""
        *lead, row, column = place_in(view, torch.Size(self.whole))
        run = next(run for run in reversed(self.runs) if run.first <= row)
        first, left = run.block + (row - run.first) // BLOCK, column // BLOCK
        rows, columns = (-(-size // BLOCK) for size in view.shape)
        return (*lead, slice(first, first + rows), slice(left, left + columns))

    def note(self, local: Tensor, offset: tuple[int, ...], largest: Tensor) -> None:
        """Raise `largest`, of the grid's shape, to the magnitudes of the part `local` that begins at `offset`."""
        for part, begin, block in self._cut(local, offset):
            padded = self._padded(part, begin)
            blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N / 128, 128, K / 128, 128]
            held = largest[self._place(part, begin, block)]
            held.copy_(torch.maximum(held, blocks.abs().amax((-1, -3)).float()))

    def cast(self, local: Tensor, offset: tuple[int, ...], largest: Tensor) -> Tensor:
        """The part `local` in e4m3. Of stacked matrices some at a time: between are four bytes a number."""
        if not local.numel():
            return local.to(E4M3)
        if local.ndim > 2 and len(local) > 1 and local.numel() > AT_ONCE:
            step = max(AT_ONCE * len(local) // local.numel(), 1)
            pieces = zip(range(0, len(local), step), local.split(step), strict=True)
            return torch.cat([self.cast(piece, (offset[0] + i, *offset[1:]), largest) for i, piece in pieces])
        cast = [self._cast(*part, largest) for part in self._cut(local, offset)]
        return cast[0] if len(cast) == 1 else torch.cat(cast, -2)

    def _cast(self, part: Tensor, offset: tuple[int, ...], block: int, largest: Tensor) -> Tensor:
        (rows, above), (columns, left) = (
            (size, begin % BLOCK) for size, begin in zip(part.shape[-2:], offset[-2:], strict=True)
        )
        blocks = self._padded(part, offset).float().unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))
        values = quantise(blocks, largest[self._place(part, offset, block)][..., :, None, :, None])
        values = values.flatten(-2).flatten(-3, -2)
        return values[..., above : above + rows, left : left + columns].contiguous()

    def _cut(self, local: Tensor, offset: tuple[int, ...]) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
        """What of a part lies in each run of rows, where that begins there, and the run's first block."""
        *lead, row, column = offset
        for run in self.runs:
            first, end = max(row, run.first), min(row + local.shape[-2], run.end)
            if first < end and local.numel():
                yield local[..., first - row : end - row, :], (*lead, first - run.first, column), run.block

    def _place(self, local: Tensor, offset: tuple[int, ...], block: int) -> tuple[slice, ...]:
        ends = [begin + size for begin, size in zip(offset, local.shape, strict=True)]
        lead = [slice(begin, end) for begin, end in zip(offset[:-2], ends[:-2], strict=True)]
        rows, columns = (slice(b // BLOCK, -(-e // BLOCK)) for b, e in zip(offset[-2:], ends[-2:], strict=True))
        return (*lead, slice(block + rows.start, block + rows.stop), columns)

    def _padded(self, local: Tensor, offset: tuple[int, ...]) -> Tensor:
        """With zeros around it, so that it begins and ends with whole blocks."""
        pads: list[int] = []
        for size, begin in zip(local.shape[:-3:-1], offset[:-3:-1], strict=True):
            pads += [begin % BLOCK, -(begin + size) % BLOCK]
        return F.pad(local, pads) if any(pads) else local


def fresh(grids: Iterable[Grid], device: torch.device) -> Tensor:
    """Largest magnitudes of the blocks of all grids, one after another, before any is known."""
    return torch.full((sum(grid.size for grid in grids),), SMALLEST, device=device)


def to_scales(largest: Tensor) -> Tensor:
    return largest / E4M3_MAX


def place_in(view: Tensor, whole: torch.Size) -> list[int]:
    """Where in a contiguous tensor of shape `whole` a view of it begins."""
    place, rest = [], view.storage_offset()
    for dim in range(len(whole)):
        stride = max(prod(whole[dim + 1 :]), 1)
        place.append(rest // stride)
        rest %= stride
    return place


def whole_in_blocks(model: Any, name: str, whole: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors of a whole parameter, in the dtype in which it would travel: matrices that are quantised
    in e4m3, each before its scales; all others as they are.
    """
    stand_in = torch.empty(whole.shape, device="meta")
    views = list(model.to_hf(name, stand_in))
    grid = Grid.of(views, whole.shape)
    if grid is None:
        yield from model.to_hf(name, whole)
        return
    parts = [cast_blocks(whole[..., run.first : run.end, :]) for run in grid.runs]
    scaled = parts[0] if len(parts) == 1 else Scaled(*(torch.cat(kind, -2) for kind in zip(*parts, strict=True)))
    for (saved, view), (_, values) in zip(views, model.to_hf(name, scaled.values), strict=True):
        yield saved, values
        yield saved + SCALE, scaled.scales[grid.blocks_of(view)].contiguous()


def restored(tensors: NamedTensors, dtype: torch.dtype = torch.float32) -> Iterator[tuple[str, Tensor]]:
    """What comes as e4m3 and scales, in any order, multiplied in float32 and then of `dtype`; all others as they are.

    Raises ValueError for one without the other.
    """
    waiting: dict[str, Tensor] = {}
    for name, tensor in tensors:
        stem = name.removesuffix(SCALE)
        other = name + SCALE if tensor.dtype == E4M3 else stem
        if other == name:
            yield name, tensor
        elif other in waiting:
            values, scales = (tensor, waiting.pop(other)) if stem == name else (waiting.pop(other), tensor)
            yield stem, _multiplied(stem, values, scales).to(dtype)
        else:
            waiting[name] = tensor.clone()  # who brings it may reuse its memory for what comes next
    if waiting:
        alone = next(iter(waiting))
        other = alone.removesuffix(SCALE) if alone.endswith(SCALE) else alone + SCALE
        raise ValueError(f"{alone} came without {other}")


def _multiplied(name: str, values: Tensor, scales: Tensor) -> Tensor:
    expected = [-(-size // BLOCK) for size in values.shape]
    if list(scales.shape) != expected or values.dtype != E4M3:
        raise ValueError(
            f"{name} of {values.dtype} and shape {list(values.shape)} needs scales of shape {expected}, and has "
            f"{list(scales.shape)}"
        )
    return restore_blocks(Scaled(values, scales))
