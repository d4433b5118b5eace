"""How new weights become a model's parameters: copies of parts of what arrives, as vLLM's own loaders make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from prl.transport.boxes import COLUMN, COLUMNS, ROW, ROWS, TENSOR, Boxes, Table, intersect_numbered
from prl.transport.buckets import Chunk
from prl.transport.flat import DTYPES
from prl.transport.moves import Moves, bytes_of
from prl.transport.receiving_nccl import Round


class Box(NamedTuple):
    """Rows and columns of a tensor taken as a matrix, as in `prl/transport/boxes.py`."""

    row: int
    rows: int
    column: int
    columns: int

    def of(self, matrix: Tensor, origin: Box) -> Tensor:
        """This box of a matrix that is the box `origin`."""
        row, column = self.row - origin.row, self.column - origin.column
        return matrix[row : row + self.rows, column : column + self.columns]


@dataclass(frozen=True)
class Copy:
    """A strided part of a tensor that arrives (size, stride, offset in elements), and where in a parameter it goes."""

    target: Tensor
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def source_in(self, tensor: Tensor) -> Tensor:
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)

    def box_in(self, shape: torch.Size) -> Box | None:
        """Which box of a contiguous tensor of that shape it takes; None: it is none."""
        columns = shape[1:].numel()
        row, column = divmod(self.offset, max(columns, 1))
        sizes = [(n, step) for n, step in zip(self.size, self.stride, strict=True) if n != 1]
        while len(sizes) > 1 and sizes[-2][1] == sizes[-1][0] * sizes[-1][1] and sizes[-2][1] != columns:
            sizes[-2:] = [(sizes[-2][0] * sizes[-1][0], sizes[-1][1])]
        if sizes and sizes[0][1] != columns:
            sizes.insert(0, (1, columns))
        rows = sizes[0][0] if sizes else 1
        match sizes[1:]:
            case []:
                count = 1
            case [(count, 1)] if column + count <= columns:
                pass
            case _:
                return None
        return Box(row, rows, column, count)

    def box(self, shape: torch.Size) -> Box | None:
        """`box_in`, where the parameter can be filled box by box, too."""
        box = self.box_in(shape)
        try:
            if box is not None:
                self.matrix(box)
        except RuntimeError:  # its dimensions do not merge into rows and columns without a copy
            return None
        return box

    def matrix(self, box: Box) -> Tensor:
        """The part of the parameter that it fills, [rows, columns]."""
        return self.target.view(box.rows, box.columns)


@dataclass(frozen=True, eq=False)
class Places:
    """Where C boxes of a checkpoint's tensors go: each into a matrix that is a part of a memory."""

    boxes: Boxes  # [C, 5]
    matrices: list[Tensor]  # [rows, columns] each
    memories: list[Tensor]  # [n] uint8, each of one or more of them
    memory: NDArray[np.int64]  # the number of each one's, [C]
    begin: NDArray[np.int64]  # where in it each begins, [C], bytes
    step: NDArray[np.int64]  # from one row to the next, [C], bytes
    converts: NDArray[np.bool_]  # [C], whether more has to be done than to copy rows of bytes

    @staticmethod
    def of(table: Table, copies: Iterable[tuple[int, Copy, Box]]) -> Places:
        """Of copies of the tensors of these numbers in `table`, which take these boxes."""
        boxes: list[tuple[int, ...]] = []
        matrices: list[Tensor] = []
        figures: list[tuple[int, ...]] = []
        memories: dict[int, int] = {}
        whole: list[Tensor] = []
        for number, copy, box in copies:
            matrix, storage = copy.matrix(box), copy.target.untyped_storage()
            if (place := memories.setdefault(storage.data_ptr(), len(whole))) == len(whole):
                whole.append(bytes_of(copy.target))
            (down, right), itemsize = matrix.stride(), matrix.itemsize
            is_odd = matrix.dtype != DTYPES[table.dtypes[number]] or (right != 1 and box.columns > 1)
            boxes.append((number, *box))
            matrices.append(matrix)
            figures.append((place, int(matrix.storage_offset()) * itemsize, down * itemsize, is_odd))
        memory, begin, step, converts = np.array(figures, dtype=np.int64).reshape(-1, 4).T
        return Places(np.array(boxes, np.int64).reshape(-1, 5), matrices, whole, memory, begin, step, converts > 0)


@dataclass(frozen=True)
class Filling:
    """What becomes of all that comes in one `Round`, as long as somebody has that."""

    places: Places
    moves: Moves
    converted: list[tuple[int, int, Box]]  # of a box that came, into a matrix: what of the tensor

    @staticmethod
    def of(arrived: Round, places: Places) -> Filling:
        piece, place, common = intersect_numbered(arrived.boxes, places.boxes)
        come, box = arrived.boxes[piece], places.boxes[place]
        itemsize, step = arrived.table.itemsizes[common[:, TENSOR]], places.step[place]
        before = (common[:, ROW] - come[:, ROW]) * come[:, COLUMNS] + common[:, COLUMN] - come[:, COLUMN]
        down, right = common[:, ROW] - box[:, ROW], common[:, COLUMN] - box[:, COLUMN]
        moves = Moves(
            source=arrived.begin[piece] + before * itemsize,
            source_step=come[:, COLUMNS] * itemsize,
            target=places.begin[place] + down * step + right * itemsize,
            target_step=step,
            rows=common[:, ROWS],
            width=common[:, COLUMNS] * itemsize,
            memory=places.memory[place],
        )
        converts = places.converts[place]
        odd = zip(piece[converts].tolist(), place[converts].tolist(), common[converts, 1:].tolist(), strict=True)
        converted = [(come, place, Box(*numbers)) for come, place, numbers in odd]
        return Filling(places, moves.at(~converts).joined(), converted)

    def run(self, arrived: Round, bucket: Tensor) -> None:
        self.moves.run(bucket, self.places.memories)
        for piece, place, common in self.converted:
            part = arrived.part(piece, bucket)
            come = Box(part.row, part.data.shape[0], part.column, part.data.shape[1])
            into = Box(*self.places.boxes[place, 1:].tolist())
            common.of(self.places.matrices[place], into).copy_(common.of(part.data, come))


@dataclass
class Copies:
    """What becomes of each tensor that arrives; those of other ranks' experts become nothing."""

    of: dict[str, list[Copy]] = field(default_factory=dict)
    form: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    _places: tuple[Table, Places] | None = field(default=None, init=False)  # of the last checkpoint's tensors
    _fillings: WeakKeyDictionary[Round, Filling] = field(default_factory=WeakKeyDictionary, init=False)

    @cached_property
    def boxes_of(self) -> dict[str, list[tuple[Copy, Box | None]]]:
        return {name: [(copy, copy.box(self.form[name][0])) for copy in copies] for name, copies in self.of.items()}

    @property
    def are_boxes(self) -> bool:
        """Whether parts of what arrives are enough."""
        return all(box is not None for copies in self.boxes_of.values() for _, box in copies)

    def boxes(self, table: Table) -> Boxes:
        """What of a checkpoint's tensors is copied. Raises ValueError for others than those of the first time."""
        arriving = {
            name: (torch.Size(shape), getattr(torch, dtype))
            for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True)
        }
        self._check_forms(arriving)
        if missing := self.of.keys() - arriving.keys():
            raise _missing(missing)
        return np.unique(self._places_of(table).boxes, axis=0)

    def _places_of(self, table: Table) -> Places:
        if self._places is None or self._places[0] is not table:
            copies = [(number, *both) for number, name in enumerate(table.names) for both in self.boxes_of[name]]
            as_boxes = [(number, copy, box) for number, copy, box in copies if box is not None]
            self._places = table, Places.of(table, as_boxes)
        return self._places[1]

    def _check_forms(self, arriving: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        for name, form in arriving.items():
            if self.form.get(name) != form:
                raise ValueError(f"{name}: {form[1]} {list(form[0])}, before {self.form.get(name)}")

    @torch.no_grad()
    def repeat_rounds(self, arriving: Iterable[tuple[Round, Tensor]]) -> None:
        """From all that `boxes` named, as it comes in buckets, [n] uint8; they are not kept until the next ones."""
        for arrived, bucket in arriving:
            if arrived not in self._fillings:
                self._fillings[arrived] = Filling.of(arrived, self._places_of(arrived.table))
            self._fillings[arrived].run(arrived, bucket)

    @torch.no_grad()
    def repeat(self, chunks: Iterable[Chunk]) -> None:
        """Raises ValueError for tensors that are not those of the first time."""
        missing = set(self.of)
        for chunk in chunks:
            pairs = []
            for name, tensor in chunk:
                self._check_forms({name: (tensor.shape, tensor.dtype)})
                missing.discard(name)
                pairs += [(copy.target, copy.source_in(tensor)) for copy in self.of[name]]
            _copy_all(pairs)
        if missing:
            raise _missing(missing)


def _missing(names: Set[str]) -> ValueError:
    return ValueError(f"{len(names)} tensors did not come, among them {', '.join(sorted(names)[:3])}")


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """(target, source) each."""
    runs: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in pairs:
        if _alike(target, source):
            targets, sources = runs.setdefault(source.dtype, ([], []))
            targets.append(target)
            sources.append(source)
        else:
            target.copy_(source)
    for targets, sources in runs.values():
        torch._foreach_copy_(targets, sources)  # one kernel for many; FSDP2 relies on it, too


def _alike(target: Tensor, source: Tensor) -> bool:
    """Whether a fused copy takes them: one kernel for a whole list only if all are contiguous and of one kind."""
    same = target.dtype == source.dtype and target.device == source.device and target.shape == source.shape
    return same and target.is_contiguous() and source.is_contiguous()
