"""What this rank holds of a checkpoint's tensors, so that it is sent from here and gathered nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from prl.models.adapters.lora import is_adapter, merged_parameters
from prl.models.layers.decoder import Decoder
from prl.models.sharding import is_sharded, local_part, place_of
from prl.trainer.world import World
from prl.transport.boxes import Boxes, Table


class Owned(Protocol):
    """`boxes` of the tensors in `table`, in its order, and their data."""

    table: Table
    boxes: Boxes

    def parts(self) -> Iterable[Tensor]:
        """Of each box, as it is now, in the trainer's own dtype: a matrix, [rows, columns] or any other shape of as
        many elements. A collective where the model has adapters.
        """


def owned_by(model: Decoder, dtype: torch.dtype | None, world: World) -> Owned:
    """dtype: in which matrices travel, None as they are. Vectors (norms, biases of routers) are small, and exact."""
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        return MergedWeights(model, dtype, world)
    return OwnShards(model, dtype, world)


def _table_of(model: Decoder, dtype: torch.dtype | None) -> Table:
    return Table.of(
        (saved, view)
        for name, tensor in _named(model)
        if not is_adapter(name)
        for saved, view in model.to_hf(name, _stand_in(tensor, dtype))
    )


def _named(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.checkpoint_buffers().items())


def _stand_in(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Of its whole shape, and of the dtype in which it travels; there is nothing in it."""
    narrows = dtype is not None and tensor.ndim > 1 and tensor.is_floating_point()
    return torch.empty(tensor.shape, dtype=dtype if narrows else tensor.dtype, device="meta")


class OwnShards:
    """Of parameters what FSDP and expert parallelism gave this rank; of buffers, which all have, all on the first."""

    def __init__(self, model: Decoder, dtype: torch.dtype | None, world: World) -> None:
        self.table = _table_of(model, dtype)
        self.sources: list[tuple[Tensor, tuple[slice | int, ...]]] = []  # a parameter and which part of what is here
        boxes: list[list[int]] = []
        number = 0
        for name, tensor in _named(model):
            shape, offset = tuple(tensor.shape), (0,) * tensor.ndim
            if is_sharded(tensor):
                shape, offset = place_of(tensor)
            held = is_sharded(tensor) or world.is_main
            for _, view in model.to_hf(name, _stand_in(tensor, dtype)):
                found = _held_of(view, tensor.shape, shape, offset) if held else None
                if found is not None:
                    box, where = found
                    boxes.append([number, *box])
                    self.sources.append((tensor, where))
                number += 1
        self.boxes = np.array(boxes, dtype=np.int64).reshape(-1, 5)

    @torch.no_grad()
    def parts(self) -> Iterator[Tensor]:
        last, local = None, torch.empty(0)
        for tensor, where in self.sources:
            if tensor is not last:
                last, local = tensor, local_part(tensor.detach())
            yield local[where]


def _held_of(
    view: Tensor, whole: torch.Size, shape: tuple[int, ...], offset: tuple[int, ...]
) -> tuple[list[int], tuple[slice | int, ...]] | None:
    """What a rank with the block at `offset` of `shape` of a parameter of shape `whole` holds of a tensor that is the
    `view` of it: (first row, rows, first column, columns) and where these lie in the block. None: nothing.
    """
    stacked = len(whole) - view.ndim  # dimensions of which the tensor is one entry
    place, rest = [], view.storage_offset()
    for dim in range(len(whole)):
        stride = int(np.prod(whole[dim + 1 :]))
        place.append(rest // max(stride, 1))
        rest %= max(stride, 1)
    where: list[slice | int] = []
    ranges: list[tuple[int, int]] = []  # of the tensor's dimensions
    for dim, (begin, count) in enumerate(zip(offset, shape, strict=True)):
        if dim < stacked:
            if not begin <= place[dim] < begin + count:
                return None
            where.append(place[dim] - begin)
            continue
        length = view.shape[dim - stacked]
        first, end = max(place[dim], begin), min(place[dim] + length, begin + count)
        if first >= end and length:
            return None
        where.append(slice(first - begin, end - begin))
        ranges.append((first - place[dim], end - first))
    if len(ranges) > 2:
        inner = int(np.prod(view.shape[2:]))
        assert all(r == (0, n) for r, n in zip(ranges[2:], view.shape[2:], strict=True)), "cut in a third dimension"
        ranges[1:] = [(ranges[1][0] * inner, ranges[1][1] * inner)]
    ranges += [(0, 1)] * (2 - len(ranges))
    return [number for pair in ranges for number in pair], tuple(where)


class MergedWeights:
    """Of a model with adapters: these are added in as whole matrices, one at a time, on the first rank."""

    def __init__(self, model: Decoder, dtype: torch.dtype | None, world: World) -> None:
        self.model, self.world = model, world
        self.table = _table_of(model, dtype)
        self.boxes = self.table.whole() if world.is_main else self.table.whole()[:0]

    def parts(self) -> Iterator[Tensor]:
        for name, whole in chain(merged_parameters(self.model), self.model.checkpoint_buffers().items()):
            if self.world.is_main:
                yield from (tensor for _, tensor in self.model.to_hf(name, whole))
