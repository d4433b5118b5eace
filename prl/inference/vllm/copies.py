"""How new weights become a model's parameters: copies of parts of what arrives, as vLLM's own loaders make them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from prl.transport.boxes import Boxes, Table
from prl.transport.buckets import Chunk
from prl.transport.receiving_nccl import Part


class Box(NamedTuple):
    """Rows and columns of a tensor taken as a matrix, as in `prl/transport/boxes.py`."""

    row: int
    rows: int
    column: int
    columns: int

    def common(self, other: Box) -> Box | None:
        row, column = max(self.row, other.row), max(self.column, other.column)
        rows = min(self.row + self.rows, other.row + other.rows) - row
        columns = min(self.column + self.columns, other.column + other.columns) - column
        return Box(row, rows, column, columns) if rows > 0 and columns > 0 else None

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


@dataclass
class Copies:
    """What becomes of each tensor that arrives; those of other ranks' experts become nothing."""

    of: dict[str, list[Copy]] = field(default_factory=dict)
    form: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)

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
        numbered = ((number, box) for number, name in enumerate(table.names) for _, box in self.boxes_of[name])
        found = list(dict.fromkeys((number, *box) for number, box in numbered if box is not None))
        return np.array(found, dtype=np.int64).reshape(-1, 5)

    def _check_forms(self, arriving: Mapping[str, tuple[torch.Size, torch.dtype]]) -> None:
        for name, form in arriving.items():
            if self.form.get(name) != form:
                raise ValueError(f"{name}: {form[1]} {list(form[0])}, before {self.form.get(name)}")

    @torch.no_grad()
    def repeat_parts(self, arriving: Iterable[list[Part]]) -> None:
        """From all that `boxes` named, in parts as they come; they are not kept until the next ones."""
        for parts in arriving:
            pairs = []
            for part in parts:
                come = Box(part.row, part.data.shape[0], part.column, part.data.shape[1])
                for copy, box in self.boxes_of[part.name]:
                    common = None if box is None else box.common(come)
                    if box is not None and common is not None:
                        pairs.append((common.of(copy.matrix(box), box), common.of(part.data, come)))
            _copy_all(pairs)

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
