"""What this rank holds of a checkpoint's tensors, so that it is sent from here and gathered nowhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.block_fp8 import SCALE
from prl.models.adapters.lora import is_adapter
from prl.models.checkpoints.block_fp8 import E4M3, Grid, fresh, place_in, to_scales
from prl.models.checkpoints.writing import hf_tensors
from prl.models.layers.decoder import Decoder
from prl.models.sharding import is_sharded, local_part, place_of
from prl.trainer.replicas import are_replicas, deal
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


def owned_by(model: Decoder, dtype: torch.dtype | None, world: World, in_blocks: bool = False) -> Owned:
    """dtype: in which matrices travel, None as they are. Vectors (norms, biases of routers) are small, and exact.
    in_blocks: matrices for engines in FP8 as e4m3, and their scales (`prl/models/checkpoints/block_fp8.py`).
    """
    if any(is_adapter(name) for name, _ in model.named_parameters()):
        return MergedWeights(model, dtype, world, in_blocks)
    return OwnShards(model, dtype, world, in_blocks)


def _named(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    return chain(model.named_parameters(), model.checkpoint_buffers().items())


@dataclass(frozen=True)
class _Sent:
    """A parameter, what a checkpoint calls its parts, and how it travels: there is nothing in the `views`."""

    tensor: Tensor
    views: list[tuple[str, Tensor]]
    grid: Grid | None  # of one that travels in blocks

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As they travel."""
        for name, view in self.views:
            if self.grid is None:
                yield name, view
            else:
                yield name, view.to(E4M3)
                yield name + SCALE, torch.empty(self.grid.shape, device="meta")[self.grid.blocks_of(view)]


def _all_sent(model: Decoder, dtype: torch.dtype | None, in_blocks: bool) -> Iterator[_Sent]:
    for name, tensor in _named(model):
        if not is_adapter(name):
            narrows = dtype is not None and tensor.ndim > 1 and tensor.is_floating_point()
            empty = torch.empty(tensor.shape, dtype=dtype if narrows else tensor.dtype, device="meta")
            views = list(model.to_hf(name, empty))
            yield _Sent(tensor, views, Grid.of(views, tensor.shape) if in_blocks else None)


@dataclass(frozen=True)
class _Part:
    """What of a tensor is here: which part of this rank's block of a parameter, or of its scales."""

    sent: int  # number of the parameter
    where: tuple[slice | int, ...]
    is_scale: bool = False


class OwnShards:
    """Of parameters what FSDP and expert parallelism gave this rank; of buffers, which all have, and of scales, all on
    the first. What replicas without FSDP have is dealt.
    """

    def __init__(self, model: Decoder, dtype: torch.dtype | None, world: World, in_blocks: bool = False) -> None:
        self.dtype, self.world = dtype, world
        self.sent = list(_all_sent(model, dtype, in_blocks))
        self.table = Table.of(chain.from_iterable(sent.tensors() for sent in self.sent))
        self.places = [_place_of(sent.tensor) for sent in self.sent]
        self.held: list[_Part] = []
        boxes: list[list[int]] = []
        number = 0
        owners = deal([sent.tensor.numel() for sent in self.sent], world.size) if are_replicas(model) else None
        for index, sent in enumerate(self.sent):
            shape, offset = self.places[index]
            held = is_sharded(sent.tensor) or world.rank == (owners[index] if owners else 0)
            for _, view in sent.views:
                found = _held_of(view, sent.tensor.shape, shape, offset) if held else None
                if found is not None:
                    box, where = found
                    boxes.append([number, *box])
                    self.held.append(_Part(index, where))
                number += 1
                if sent.grid is None:
                    continue
                if world.is_main:
                    rows, columns = self.table.shapes[number]
                    boxes.append([number, 0, rows, 0, columns])
                    self.held.append(_Part(index, sent.grid.blocks_of(view), is_scale=True))
                number += 1
        self.boxes = np.array(boxes, dtype=np.int64).reshape(-1, 5)

    @torch.no_grad()
    def parts(self) -> Iterator[Tensor]:
        """Of matrices in blocks after a reduction over all ranks, which each takes part in at once."""
        largest = self._find_largest() if any(sent.grid for sent in self.sent) else {}
        return self._parts(largest)

    def _parts(self, largest: dict[int, Tensor]) -> Iterator[Tensor]:
        last, local = -1, torch.empty(0)
        for part in self.held:
            grid = self.sent[part.sent].grid
            if part.is_scale:
                yield to_scales(largest[part.sent][part.where])
                continue
            if part.sent != last:
                last, local = part.sent, local_part(self.sent[part.sent].tensor.detach())
                if grid is not None:
                    local = grid.cast(self._rounded(local), self.places[last][1], largest[last])
            yield local[part.where]

    def _find_largest(self) -> dict[int, Tensor]:
        """Magnitudes of the blocks of each parameter that has such: a collective."""
        grids = {index: sent.grid for index, sent in enumerate(self.sent) if sent.grid is not None}
        flat = fresh(grids.values(), self.world.device)
        found = dict(zip(grids, flat.split([grid.size for grid in grids.values()]), strict=True))
        for index, grid in grids.items():
            found[index] = found[index].view(grid.shape)
            grid.note(self._rounded(local_part(self.sent[index].tensor.detach())), self.places[index][1], found[index])
        if self.world.size > 1:
            dist.all_reduce(flat, op=dist.ReduceOp.MAX)
        return found

    def _rounded(self, local: Tensor) -> Tensor:
        return local.to(self.world.device, self.dtype or local.dtype)


def _place_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of what is here, and where in the whole it begins."""
    return place_of(tensor) if is_sharded(tensor) else (tuple(tensor.shape), (0,) * tensor.ndim)


def _held_of(
    view: Tensor, whole: torch.Size, shape: tuple[int, ...], offset: tuple[int, ...]
) -> tuple[list[int], tuple[slice | int, ...]] | None:
    """What a rank with the block at `offset` of `shape` of a parameter of shape `whole` holds of a tensor that is the
    `view` of it: (first row, rows, first column, columns) and where these lie in the block. None: nothing.
    """
    stacked = len(whole) - view.ndim  # dimensions of which the tensor is one entry
    place = place_in(view, whole)
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

    def __init__(self, model: Decoder, dtype: torch.dtype | None, world: World, in_blocks: bool = False) -> None:
        self.model, self.dtype, self.world, self.in_blocks = model, dtype, world, in_blocks
        self.table = Table.of(chain.from_iterable(sent.tensors() for sent in _all_sent(model, dtype, in_blocks)))
        self.boxes = self.table.whole() if world.is_main else self.table.whole()[:0]

    def parts(self) -> Iterator[Tensor]:
        if self.in_blocks:
            tensors = hf_tensors(self.model, self.dtype, in_blocks=True)
        else:
            tensors = hf_tensors(self.model)
        for _, tensor in tensors:
            if self.world.is_main:
                yield tensor
