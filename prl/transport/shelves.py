"""What each trainer rank keeps for engines: parts of tensors one after another, and before them what they are.

Of what several ranks hold, one keeps it. Parts are cast on their way onto the shelf, and checksums are worked out by
several threads, there and where they are read: zlib lets other threads run meanwhile.

A shelf's head: four lengths, then as many runs of bytes: the table of all tensors (the first rank's alone has it),
boxes, CRC-32 of each parcel, what else the transport says.
"""

from __future__ import annotations

import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prl.transport.boxes import (
    COLUMN,
    COLUMNS,
    MOST_BYTES,
    ROW,
    ROWS,
    TENSOR,
    Boxes,
    Table,
    divide_numbered,
    pack_boxes,
    unpack_boxes,
)
from prl.transport.flat import ALIGN, DTYPES
from prl.transport.rounds import turns
from prl.transport.to_host import is_elsewhere, move

PARCEL_BYTES = 16 << 20  # checked at once is what begins in so many bytes; an engine holds that much for each rank
THREADS = min(8, os.cpu_count() or 1)
LENGTHS = struct.Struct("<4Q")

Gather = Callable[[bytes], list[bytes]]  # a collective: what each rank has called it with


def alone(data: bytes) -> list[bytes]:
    """`Gather` of an only rank."""
    return [data]


@dataclass(frozen=True)
class Shelf:
    """Where the boxes of one rank lie: box after box, and cut into parcels of whole pieces."""

    table: Table
    boxes: Boxes  # [N, 5]

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Of each box, [N + 1], bytes; the last is where all end."""
        sizes = -(-self.table.nbytes(self.boxes) // ALIGN) * ALIGN
        return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    @property
    def nbytes(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def parcels(self) -> list[tuple[int, int, list[tuple[list[int], int]]]]:
        """(First byte, end, its pieces with where each begins in it)."""
        index, pieces = divide_numbered(self.boxes, self.table, PARCEL_BYTES)
        row_bytes = pieces[:, COLUMNS] * self.table.itemsizes[pieces[:, TENSOR]]
        places = self.offsets[index] + (pieces[:, ROW] - self.boxes[index, ROW]) * row_bytes
        firsts = np.flatnonzero(np.diff(places // PARCEL_BYTES, prepend=-1)).tolist()
        found = []
        for first, end in pairwise([*firsts, len(pieces)]):
            begin = int(places[first])
            stop = self.nbytes if end == len(pieces) else int(places[end])
            inside = (places[first:end] - begin).tolist()
            found.append((begin, stop, list(zip(pieces[first:end].tolist(), inside, strict=True))))
        return found

    def view(self, buffer: Any, box: list[int], offset: int) -> Tensor:
        """A box at an offset of a buffer: [rows, columns]."""
        dtype, count = DTYPES[self.table.dtypes[box[TENSOR]]], box[ROWS] * box[COLUMNS]
        if not count:
            return torch.empty(box[ROWS], box[COLUMNS], dtype=dtype, device="cpu")
        return torch.frombuffer(buffer, dtype=dtype, count=count, offset=offset).view(box[ROWS], box[COLUMNS])

    def fill(self, buffer: Any, parts: Iterable[Tensor], origin: int = 0) -> NDArray[np.uint32]:
        """`parts`: of each box, in any dtype; they are asked for one at a time. `origin`: of the shelf in the buffer.
        Returns the CRC-32 of each parcel.
        """
        ends, view = [stop for _, stop, _ in self.parcels], memoryview(buffer)
        checking: list[Any] = []
        moving: deque[tuple[int, Any]] = deque()  # stretches on their way, each with where its box begins
        with ThreadPoolExecutor(THREADS, "checksums") as pool:
            # parts first: of all that there are, and of those behind what is kept, which may come from collectives
            places = zip(parts, self.boxes.tolist(), self.offsets[:-1].tolist(), strict=True)
            for part, box, offset in places:
                place = self.view(buffer, box, origin + offset)
                if is_elsewhere(part):
                    moving.extend((offset, stretch) for stretch in move(part, place, pool))
                else:
                    place.copy_(part.detach().reshape(place.shape))
                while moving and moving[0][1].done():
                    moving.popleft()[1].result()
                there = moving[0][0] if moving else offset + place.nbytes  # all before is
                while len(checking) < len(ends) - 1 and ends[len(checking)] <= there:
                    checking.append(self._check_later(pool, view, origin, len(checking)))
            while moving:
                moving.popleft()[1].result()
            for number in range(len(checking), len(ends)):
                checking.append(self._check_later(pool, view, origin, number))
            return np.array([check.result() for check in checking], dtype=np.uint32)

    def _check_later(self, pool: ThreadPoolExecutor, view: memoryview, origin: int, number: int) -> Any:
        begin, stop, _ = self.parcels[number]
        return pool.submit(zlib.crc32, view[origin + begin : origin + stop])

    def damaged(self, buffer: Any, sums: NDArray[np.uint32], origin: int = 0) -> bool:
        """Whether any parcel is not what it was."""
        view = memoryview(buffer)
        with ThreadPoolExecutor(THREADS, "checksums") as pool:
            found = [self._check_later(pool, view, origin, number) for number in range(len(self.parcels))]
            return [check.result() for check in found] != sums.tolist()


class Keeper:
    """One trainer rank's side of a transport that keeps versions on shelves."""

    def __init__(self, rank: int, gather: Gather) -> None:
        self.rank, self.gather = rank, gather

    def hold(self, table: Table, boxes: Boxes) -> None:
        """Tell what this rank holds, in order of the table, and hear it of all others: before the first `publish`."""
        holdings = [unpack_boxes(packed, table) for packed in self.gather(pack_boxes(boxes))]
        self.keeps: list[bool] = (turns(holdings)[self.rank][0] == 0).tolist()
        self.shelf = Shelf(table, boxes[np.array(self.keeps, dtype=bool)])

    def kept(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """Those of this rank's parts that it keeps; all are asked for, for they may come from collectives."""
        for part, keeps in zip(parts, self.keeps, strict=True):
            if keeps:
                yield part


def pack_head(shelf: Shelf, sums: NDArray[np.uint32], said: bytes, with_table: bool) -> bytes:
    runs = [shelf.table.pack() if with_table else b"", pack_boxes(shelf.boxes), sums.astype("<u4").tobytes(), said]
    return LENGTHS.pack(*map(len, runs)) + b"".join(runs)


def read_head(read: Callable[[int], bytes], table: Table | None) -> tuple[Shelf, NDArray[np.uint32], bytes]:
    """`read`: so many bytes of it; `table`: the first rank's, None where this is the first. Raises ValueError for what
    `pack_head` has not made.
    """
    lengths = LENGTHS.unpack(read(LENGTHS.size))
    if max(lengths) > MOST_BYTES:
        raise ValueError("not what a trainer has packed: the head of its weights is too long")
    packed, boxes, sums, said = (bytes(read(length)) for length in lengths)
    table = Table.unpack(packed) if table is None else table
    shelf = Shelf(table, unpack_boxes(boxes, table))
    if len(sums) != 4 * len(shelf.parcels):
        raise ValueError("not what a trainer has packed: there is another number of checksums than of parcels")
    return shelf, np.frombuffer(sums, dtype="<u4"), said


class Assembly:
    """Whole tensors out of parts, which several threads may put in.

    place: where a tensor comes to lie, a matrix, by its number; None: in memory of its own.
    """

    def __init__(self, table: Table, place: Callable[[int], Tensor] | None = None) -> None:
        self.table, self.place, self.lock = table, place, threading.Lock()
        self.found: dict[int, Tensor] = {}  # by number, as matrices
        self.left: dict[int, int] = {}  # elements

    def put(self, box: list[int], data: Tensor) -> None:
        number = box[TENSOR]
        with self.lock:
            if number not in self.found:
                rows, columns = int(self.table.rows[number]), int(self.table.columns[number])
                place = self.place
                self.found[number] = (
                    place(number) if place else torch.empty(rows, columns, dtype=data.dtype, device="cpu")
                )
                self.left[number] = rows * columns
            self.left[number] -= data.numel()
        part = self.found[number][box[ROW] : box[ROW] + box[ROWS], box[COLUMN] : box[COLUMN] + box[COLUMNS]]
        part.copy_(data)

    def take(self, number: int) -> Tensor:
        """A tensor, which is kept no longer. Raises ValueError unless it is whole."""
        if self.left.pop(number, None) != 0:
            raise ValueError(f"the parts of {self.table.names[number]} are not the whole")
        return self.found.pop(number).view(self.table.shapes[number])

    def check_whole(self) -> None:
        """Of all tensors. Raises ValueError as `take` does."""
        for number in range(len(self.table.names)):
            self.take(number)
