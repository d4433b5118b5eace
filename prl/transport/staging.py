"""A trainer rank's weights on their way: cast into buckets, and from there into messages, one for each engine process.

What is copied where is worked out once, in runs as long as they are, and done again for every version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.transport.boxes import COLUMN, COLUMNS, ROW, ROWS, TENSOR
from prl.transport.flat import DTYPES
from prl.transport.moves import Moves
from prl.transport.rounds import SUM_BYTES, Message, Schedule


@dataclass
class Bucket:
    """Memory and when the GPU is done with what was last done to it (None: on a CPU, at once)."""

    data: Tensor  # [n] uint8
    event: torch.cuda.Event | None = None

    @staticmethod
    def of(size: int, device: torch.device) -> Bucket:
        return Bucket(torch.empty(size, dtype=torch.uint8, device=device))

    def mark(self) -> None:
        if self.data.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def await_last_use(self) -> None:
        """Make the current stream wait, not the caller."""
        if self.event is not None:
            self.event.wait()


def checksum(data: Tensor) -> Tensor:
    """Sum of its 32-bit words, modulo 2^64, [1] int64: computed where the bytes are, at the speed of their memory."""
    return data.view(torch.int32).sum(dtype=torch.int64).view(1)


@dataclass
class _Cast:
    """Elements that lie one after another both in a trainer's memory and in a bucket."""

    source: Tensor  # the tensor that they begin in, flat
    first: int  # element of it
    count: int  # elements, which may go on beyond `source`
    dtype: torch.dtype  # in the bucket
    offset: int  # in the bucket, bytes

    def goes_on(self, source: Tensor, first: int, dtype: torch.dtype, offset: int) -> bool:
        ours = self.source
        return (
            dtype == self.dtype
            and source.dtype == ours.dtype
            and offset == self.offset + self.count * dtype.itemsize
            and source.data_ptr() + first * source.itemsize
            == ours.data_ptr() + (self.first + self.count) * ours.itemsize
            and source.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
        )

    def values(self) -> Tensor:
        return self.source.as_strided((self.count,), (1,), self.source.storage_offset() + self.first)


class Staging:
    """Of one trainer rank: its parts, in the order in which it holds them, into the buckets of its laps."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        share = schedule.shares[rank]
        self.laps, self.bytes = schedule.laps, schedule.lap_bytes[rank]
        table, pieces = schedule.table, share.pieces
        self.places = list(
            zip(
                (share.round // schedule.rounds_per_lap).tolist(),
                (pieces[:, ROWS] * pieces[:, COLUMNS]).tolist(),
                [DTYPES[table.dtypes[number]] for number in pieces[:, TENSOR].tolist()],
                share.offset.tolist(),
                strict=True,
            )
        )

    def casts(self, parts: Iterable[Tensor]) -> Iterator[list[_Cast]]:
        """What is copied into the bucket of each lap, of a rank that holds anything. A lap is asked for when the one
        before has been copied.
        """
        runs: list[_Cast] = []
        arriving, source, first = iter(parts), torch.empty(0), 0
        ends = [lap for lap, *_ in self.places[1:]] + [self.laps]  # the lap of what comes next
        for (lap, count, dtype, offset), next_lap in zip(self.places, ends, strict=True):
            if first >= source.numel():
                source, first = next(arriving).detach().contiguous().view(-1), 0
            if runs and runs[-1].goes_on(source, first, dtype, offset):
                runs[-1].count += count
            else:
                runs.append(_Cast(source, first, count, dtype, offset))
            first += count
            for _ in range(next_lap - lap):
                yield runs
                runs = []
        for _ in arriving:  # where they come from collectives
            pass


def fill(bucket: Tensor, runs: list[_Cast]) -> None:
    """`bucket` [n] uint8. On a GPU many travel in one kernel."""
    places = [bucket[run.offset : run.offset + run.count * run.dtype.itemsize].view(run.dtype) for run in runs]
    values = [run.values() for run in runs]
    for number, run in enumerate(runs):
        if run.dtype.itemsize == 1 and run.source.dtype == run.dtype:  # kernels that copy many know few such dtypes
            places[number], values[number] = places[number].view(torch.uint8), values[number].view(torch.uint8)
    if places:
        torch._foreach_copy_(places, values, non_blocking=True)


class Outgoing:
    """What one trainer rank sends in each round, to engine processes by their number."""

    def __init__(self, schedule: Schedule, rank: int, messages: list[Message], verify: bool) -> None:
        self.verify, share = verify, schedule.shares[rank]
        trailer = SUM_BYTES if verify else 0
        given = np.stack([m.sizes + trailer * (m.sizes > 0) for m in messages], axis=1)  # [R, E]
        begins = np.cumsum(given, axis=1) - given
        self.sizes: list[list[int]] = given.tolist()
        self.bytes = int(given.sum(axis=1).max(initial=0))
        boxes, piece, number, offset = (
            np.concatenate([getattr(m, name) for m in messages]) for name in ("boxes", "piece", "round", "offset")
        )
        engine = np.repeat(np.arange(len(messages)), [len(m.boxes) for m in messages])
        whole, itemsize = share.pieces[piece], schedule.table.itemsizes[boxes[:, TENSOR]]
        before = (boxes[:, ROW] - whole[:, ROW]) * whole[:, COLUMNS] + boxes[:, COLUMN] - whole[:, COLUMN]
        width = boxes[:, COLUMNS] * itemsize
        moves = Moves(
            source=share.offset[piece] + before * itemsize,
            source_step=whole[:, COLUMNS] * itemsize,
            target=begins[number, engine] + offset,
            target_step=width,
            rows=boxes[:, ROWS],
            width=width,
            memory=np.zeros_like(number),
        )
        self.moves = moves.by_round(number, schedule.rounds)

    def pack(self, number: int, bucket: Tensor, given: Tensor) -> Tensor:
        """The messages of a round, from its lap's bucket into `given`; both [n] uint8. Returns what of it is sent."""
        self.moves[number].run(bucket, [given])
        if self.verify:
            begin = 0
            for size in self.sizes[number]:
                if size:
                    end = begin + size - SUM_BYTES
                    given[end : end + 8].view(torch.int64).copy_(checksum(given[begin:end]))
                begin += size
        return given[: sum(self.sizes[number])]
