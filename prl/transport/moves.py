"""Many boxes of bytes copied from one memory into others, worked out once as arrays: a model of many experts has so
many that an object for each, and a call for each copy, would take longer than the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from prl.transport.moves_kernel import Launch

Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Moves:
    """M boxes of `rows` times `width` bytes, [M] each. Each begins at the byte `source` of one memory and at the byte
    `target` of that of many which has the number `memory`; from a row to the next are so many bytes there and there.
    """

    source: Numbers
    source_step: Numbers
    target: Numbers
    target_step: Numbers
    rows: Numbers
    width: Numbers
    memory: Numbers

    def __len__(self) -> int:
        return len(self.source)

    def at(self, index: Any) -> Moves:
        """Those of these numbers, or of a mask."""
        return Moves(*(column[index] for column in self.columns()))

    def columns(self) -> tuple[Numbers, ...]:
        """In the order above."""
        return self.source, self.source_step, self.target, self.target_step, self.rows, self.width, self.memory

    def joined(self) -> Moves:
        """The same bytes in fewer and longer ones: without what is empty, and neighbours as one that are so on both
        sides.
        """
        return self._joined(np.zeros_like(self.source))[0]

    def by_round(self, number: Numbers, rounds: int) -> list[Moves]:
        """Those of each round, joined, in the order in which they are; number: of the round of each."""
        order = np.argsort(number, kind="stable")
        moves, number = self.at(order)._joined(number[order])
        ends = np.searchsorted(number, np.arange(rounds + 1)).tolist()
        return [moves.at(slice(*of_round)) for of_round in pairwise(ends)]

    def _joined(self, apart: Numbers) -> tuple[Moves, Numbers]:
        """`joined`, but for those of which `apart` is not the same; and that of each that is left."""
        flat = (self.source_step == self.width) & (self.target_step == self.width) | (self.rows == 1)
        width, rows = np.where(flat, self.width * self.rows, self.width), np.where(flat, 1, self.rows)
        there = (rows > 0) & (width > 0)
        straight, apart = replace(self, width=width, rows=rows).at(there), apart[there]
        if not len(straight):
            return straight, apart
        goes_on = (straight.rows[1:] == 1) & (straight.rows[:-1] == 1) & (apart[1:] == apart[:-1])
        goes_on &= straight.source[1:] == straight.source[:-1] + straight.width[:-1]
        goes_on &= straight.target[1:] == straight.target[:-1] + straight.width[:-1]
        goes_on &= straight.memory[1:] == straight.memory[:-1]
        firsts = np.flatnonzero(np.concatenate([[True], ~goes_on]))
        return replace(straight.at(firsts), width=np.add.reduceat(straight.width, firsts)), apart[firsts]

    def run(self, source: Tensor, targets: Sequence[Tensor]) -> None:
        """Copy out of `source` into `targets`, [n] uint8 each and all of one device. On a GPU, one kernel or few.

        Raises ValueError on a CPU for what lies beyond a memory.
        """
        if not len(self):
            return
        if source.is_cuda:
            self.launches(source.device).run(source, targets)
        else:
            self._run_on_host(source.numpy(), targets)

    def launches(self, device: torch.device) -> Launch:
        if device not in self._launches:
            from prl.transport.moves_kernel import Launch

            self._launches[device] = Launch(self, device)
        return self._launches[device]

    @cached_property
    def _launches(self) -> dict[torch.device, Launch]:
        return {}

    def _run_on_host(self, source: NDArray[np.uint8], targets: Sequence[Tensor]) -> None:
        there = {number: targets[number].numpy() for number in np.unique(self.memory).tolist()}
        columns = (column.tolist() for column in self.columns())
        for begin, step, place, place_step, rows, width, memory in zip(*columns, strict=True):
            if rows == 1:
                there[memory][place : place + width] = source[begin : begin + width]
                continue
            box = np.ndarray((rows, width), np.uint8, source, begin, (step, 1))
            np.ndarray((rows, width), np.uint8, there[memory], place, (place_step, 1))[:] = box


def bytes_of(tensor: Tensor) -> Tensor:
    """All of the storage that a tensor lies in, [n] uint8."""
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage())
