"""Parts of a checkpoint's tensors: who holds which, and who wants which.

A tensor is taken as a matrix: its first dimension are rows, all others together one row; a scalar has one row. A part
of it is a box of rows and columns. Many are an array [N, 5] of int64: number of the tensor in a `Table`, first row,
rows, first column, columns.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prl.transport.flat import DTYPES, MAX_NAME, size_of

Boxes = NDArray[np.int64]
TENSOR, ROW, ROWS, COLUMN, COLUMNS = range(5)
MOST_BYTES = 1 << 30  # of what a table or boxes may be, unpacked


@dataclass(frozen=True)
class Table:
    """The tensors of a checkpoint, in the order in which they travel: names, dtypes (as torch calls them), shapes."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]

    @staticmethod
    def of(tensors: Iterable[tuple[str, Tensor]]) -> Table:
        """Their data is not asked for."""
        named = list(tensors)
        dtypes = [str(tensor.dtype).removeprefix("torch.") for _, tensor in named]
        return Table([name for name, _ in named], dtypes, [list(tensor.shape) for _, tensor in named])

    @cached_property
    def numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    @cached_property
    def rows(self) -> NDArray[np.int64]:
        return np.array([shape[0] if shape else 1 for shape in self.shapes], dtype=np.int64)

    @cached_property
    def columns(self) -> NDArray[np.int64]:
        return np.array([prod(shape[1:]) for shape in self.shapes], dtype=np.int64)

    @cached_property
    def itemsizes(self) -> NDArray[np.int64]:
        return np.array([DTYPES[dtype].itemsize for dtype in self.dtypes], dtype=np.int64)

    def whole(self) -> Boxes:
        """A box for each tensor, of all of it."""
        zeros = np.zeros(len(self.names), dtype=np.int64)
        return np.stack([np.arange(len(self.names)), zeros, self.rows, zeros, self.columns], axis=1)

    def nbytes(self, boxes: Boxes) -> NDArray[np.int64]:
        """Of each box, [N]."""
        return boxes[:, ROWS] * boxes[:, COLUMNS] * self.itemsizes[boxes[:, TENSOR]]

    def pack(self) -> bytes:
        return zlib.compress(json.dumps([self.names, self.dtypes, self.shapes]).encode(), 1)

    @staticmethod
    def unpack(data: bytes) -> Table:
        """Raises ValueError for what `pack` has not made."""
        match json.loads(_inflate(data)):
            case [[*names], [*dtypes], [*shapes]] if len(names) == len(dtypes) == len(shapes):
                for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                    if not isinstance(name, str) or len(name) > MAX_NAME:
                        raise ValueError(f"no tensor has the name {str(name)[:50]!r}")
                    size_of(dtype, shape)
                return Table(names, dtypes, shapes)
        raise ValueError("a table of tensors has names, dtypes and shapes, as many of each")


def pack_boxes(boxes: Boxes) -> bytes:
    return zlib.compress(np.ascontiguousarray(boxes, dtype="<i8").tobytes(), 1)


def unpack_boxes(data: bytes, table: Table) -> Boxes:
    """Raises ValueError for what `pack_boxes` has not made, and for boxes beyond their tensors."""
    flat = _inflate(data)
    if len(flat) % 40:
        raise ValueError("a box has five numbers")
    boxes = np.frombuffer(flat, dtype="<i8").reshape(-1, 5).astype(np.int64)
    numbers, sizes = boxes[:, TENSOR], boxes[:, 1:]
    if ((numbers < 0) | (numbers >= len(table.names))).any() or ((sizes < 0) | (sizes > 1 << 48)).any():
        raise ValueError("a box lies in no tensor")
    beyond = boxes[:, ROW] + boxes[:, ROWS] > table.rows[numbers]
    beyond |= boxes[:, COLUMN] + boxes[:, COLUMNS] > table.columns[numbers]
    if beyond.any():
        raise ValueError(f"a box of {table.names[int(numbers[beyond][0])]} lies beyond it")
    return boxes


def _inflate(data: bytes) -> bytes:
    unpacker = zlib.decompressobj()
    try:
        flat = unpacker.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ValueError(f"not what a trainer has packed: {error}") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError("not what a trainer has packed: it does not end")
    return flat


def divide(boxes: Boxes, table: Table, most_bytes: int) -> Boxes:
    """The same in pieces of at most so many bytes, or of one row where a row has more. Boxes of nothing stay."""
    return divide_numbered(boxes, table, most_bytes)[1]


def divide_numbered(boxes: Boxes, table: Table, most_bytes: int) -> tuple[NDArray[np.int64], Boxes]:
    """`divide`, and before it of which box each piece is, [P]."""
    row_bytes = np.maximum(boxes[:, COLUMNS] * table.itemsizes[boxes[:, TENSOR]], 1)
    step = np.maximum(most_bytes // row_bytes, 1)  # rows of a piece
    count = np.maximum(-(-boxes[:, ROWS] // step), 1)
    index = np.repeat(np.arange(len(boxes)), count)
    done = (np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count)) * step[index]
    pieces = boxes[index]
    pieces[:, ROW] += done
    pieces[:, ROWS] = np.minimum(step[index], pieces[:, ROWS] - done)
    return index, pieces


def intersect(pieces: Boxes, wanted: Boxes) -> tuple[NDArray[np.int64], Boxes]:
    """What of `pieces` somebody wants: (numbers of pieces [M], boxes [M, 5]), in the order of pieces."""
    index, _, common = intersect_numbered(pieces, wanted)
    return index, common


def intersect_numbered(pieces: Boxes, wanted: Boxes) -> tuple[NDArray[np.int64], NDArray[np.int64], Boxes]:
    """`intersect`, and in second place the numbers of `wanted` [M]."""
    order = np.argsort(wanted[:, TENSOR], kind="stable")
    tensors = wanted[order, TENSOR]
    first = np.searchsorted(tensors, pieces[:, TENSOR], "left")
    count = np.searchsorted(tensors, pieces[:, TENSOR], "right") - first
    index = np.repeat(np.arange(len(pieces)), count)
    number = order[np.arange(len(index)) - np.repeat(np.cumsum(count) - count, count) + first[index]]
    common, other = pieces[index], wanted[number]
    for begin, length in ((ROW, ROWS), (COLUMN, COLUMNS)):
        end = np.minimum(common[:, begin] + common[:, length], other[:, begin] + other[:, length])
        common[:, begin] = np.maximum(common[:, begin], other[:, begin])
        common[:, length] = end - common[:, begin]
    there = (common[:, ROWS] > 0) & (common[:, COLUMNS] > 0)
    return index[there], number[there], common[there]
