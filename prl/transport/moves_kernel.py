# mypy: allow-untyped-defs, allow-untyped-calls
"""`Moves` on a GPU: a Triton kernel for all boxes that are copied in words of one size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from prl.transport.moves import Moves

WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}
BLOCK = 2048  # words of one program


@triton.jit
def _move(source, targets, table, begins, owners, WORD: tl.constexpr, NBYTES: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    move = tl.load(owners + block)
    at = table + move.to(tl.int64) * 7
    rows = tl.load(at + 4).to(tl.int32)
    width = tl.load(at + 5).to(tl.int32)
    index = (block - tl.load(begins + move)) * BLOCK + tl.arange(0, BLOCK)
    inside = index < rows * width
    here = (source + tl.load(at)).to(tl.pointer_type(WORD))
    there = (tl.load(targets + tl.load(at + 6)) + tl.load(at + 2)).to(tl.pointer_type(WORD))
    if rows == 1:
        tl.store(there + index, tl.load(here + index, mask=inside), mask=inside)
    else:
        row = index // width
        column = index - row * width
        from_step = tl.load(at + 1) // NBYTES
        to_step = tl.load(at + 3) // NBYTES
        words = tl.load(here + row * from_step + column, mask=inside)
        tl.store(there + row * to_step + column, words, mask=inside)


class _Group(NamedTuple):
    """Boxes of words of `nbytes`: rows of the table, each one's first program, each program's box."""

    nbytes: int
    table: Tensor  # [M, 7] int64, widths in words
    begins: Tensor  # [M] int32
    owners: Tensor  # [programs] int32


class Launch:
    """What the kernel is told of `moves`, on `device`."""

    def __init__(self, moves: Moves, device: torch.device) -> None:
        self.groups: list[_Group] = []
        several = moves.rows > 1
        parts = moves.source | moves.target | moves.width
        parts |= np.where(several, moves.source_step | moves.target_step, 0)
        nbytes = np.minimum(parts & -parts, max(WORDS))  # the largest power of 2 that divides them all
        for size in np.unique(nbytes).tolist():
            chosen = moves.at(nbytes == size)
            words = chosen.width // size
            count = -(-chosen.rows * words // BLOCK)
            columns = replace(chosen, width=words).columns()
            self.groups.append(
                _Group(
                    size,
                    torch.from_numpy(np.stack(columns, 1)).to(device),
                    torch.from_numpy((np.cumsum(count) - count).astype(np.int32)).to(device),
                    torch.from_numpy(np.repeat(np.arange(len(count), dtype=np.int32), count)).to(device),
                )
            )

    def run(self, source: Tensor, targets: Sequence[Tensor]) -> None:
        """Memories must begin at multiples of 8, as those of PyTorch's allocators do."""
        addresses = [target.data_ptr() for target in targets]
        assert not (source.data_ptr() | int(np.bitwise_or.reduce(addresses))) % max(WORDS)
        on_host = torch.tensor(addresses, dtype=torch.int64, device="cpu").pin_memory()  # vLLM has another default
        there = on_host.to(source.device, non_blocking=True)
        with torch.cuda.device(source.device):
            for group in self.groups:
                _move[(len(group.owners),)](
                    source, there, group.table, group.begins, group.owners,
                    WORD=WORDS[group.nbytes], NBYTES=group.nbytes, BLOCK=BLOCK, num_warps=8,
                )  # fmt: skip
