"""Weights from all trainer ranks to all engine processes in rounds of bounded size, by a plan from both layouts.

Each rank goes through what it holds (`boxes.py`) in the same order and at the same pace, so that all send all the time:
of a rank's bytes, the k-th of K laps has the k-th part. A lap is what a rank stages at a time, in a bucket. It is sent
in rounds, so that what an engine process gets in one, from all ranks together, is no more than a bucket either.

Who holds what decides laps and rounds; whoever reads it comes to the same. Replicas that hold the same take turns with
the engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prl.transport.boxes import Boxes, Table, divide, intersect

ALIGN = 16  # bytes, of whatever lies in a bucket
SUM_BYTES = 16  # behind a message: its checksum, padded
PIECE_BYTES = 1 << 20  # which no bucket needs finer
STAGED = 0.75  # of a bucket is a lap: what is left is for the messages that are made of it


PartsOf = Callable[[int], list[NDArray[np.int64]]]  # a count of parts -> in which each piece is, of each rank


@dataclass(frozen=True)
class Share:
    """What one trainer rank sends, in the order in which it does: P pieces."""

    pieces: Boxes  # [P, 5]
    round: NDArray[np.int64]  # of each, [P]
    offset: NDArray[np.int64]  # in the bucket of its lap, [P], bytes
    turn: NDArray[np.int64]  # its number among the ranks that hold the same piece, [P]
    holders: NDArray[np.int64]  # how many these are, [P]


@dataclass(frozen=True)
class Message:
    """What one trainer rank sends to one engine process: M boxes."""

    boxes: Boxes  # [M, 5]
    piece: NDArray[np.int64]  # of the rank, in which each lies, [M]
    round: NDArray[np.int64]  # [M]
    offset: NDArray[np.int64]  # in the message of its round, [M], bytes
    sizes: NDArray[np.int64]  # of the messages of all rounds, [R], bytes; checksums are not counted

    def of_round(self, number: int) -> slice:
        """Numbers of its boxes."""
        return slice(*np.searchsorted(self.round, [number, number + 1]).tolist())


@dataclass
class Schedule:
    """Laps and rounds of all trainer ranks."""

    table: Table
    shares: list[Share]
    laps: int
    rounds_per_lap: int
    lap_bytes: list[int] = field(default_factory=list)  # the most that each rank stages

    @property
    def rounds(self) -> int:
        return self.laps * self.rounds_per_lap

    @staticmethod
    def of(table: Table, holdings: list[Boxes], bucket_bytes: int) -> Schedule:
        """`holdings`: of each trainer rank, in order of the table. A row longer than a bucket makes it longer."""
        ranks = len(holdings)
        most = max(bucket_bytes // (4 * ranks), min(bucket_bytes // 4, PIECE_BYTES))
        pieces = [divide(held, table, most) for held in holdings]
        sizes = [_aligned(table.nbytes(p)) for p in pieces]
        in_turn = turns(pieces)
        first = [turn == 0 for turn, _ in in_turn]  # each piece once
        laps = _fewest(lambda n: [_parts(size, n) for size in sizes], sizes, int(STAGED * bucket_bytes), 1)

        def received(count: int) -> list[NDArray[np.int64]]:
            rounds = [_parts(size, laps * count) for size in sizes]
            return [np.concatenate([r[f] for r, f in zip(rounds, first, strict=True)])]

        once = [np.concatenate([size[f] for size, f in zip(sizes, first, strict=True)])]
        per_lap = _fewest(received, once, bucket_bytes, laps)
        shares, lap_bytes = [], []
        for p, size, (turn, holders) in zip(pieces, sizes, in_turn, strict=True):
            offset, lap_sizes = _offsets(size, _parts(size, laps), laps)
            shares.append(Share(p, _parts(size, laps * per_lap), offset, turn, holders))
            lap_bytes.append(int(lap_sizes.max(initial=0)))
        return Schedule(table, shares, laps, per_lap, lap_bytes)

    def message(self, rank: int, engine: int, wanted: Boxes | None) -> Message:
        """From a trainer rank to the engine process of that number, which wants these boxes (None: everything)."""
        share = self.shares[rank]
        mine = np.flatnonzero(engine % share.holders == share.turn)
        boxes = share.pieces[mine]
        if wanted is None:
            piece = mine
        else:
            index, boxes = intersect(boxes, wanted)
            piece = mine[index]
        offset, sizes = _offsets(_aligned(self.table.nbytes(boxes)), share.round[piece], self.rounds)
        return Message(boxes, piece, share.round[piece], offset, sizes)


def _aligned(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    return -(-sizes // ALIGN) * ALIGN


def _parts(sizes: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Which of `count` equal parts of all bytes each piece begins in, [P]."""
    before = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    return np.minimum(before * count // max(total, 1), count - 1)  # what is empty may come last


def _fewest(parts_of: PartsOf, sizes: list[NDArray[np.int64]], most: int, unit: int) -> int:
    """The least count, nearly, for which no part has more bytes than `most`; `unit`: a count of 1 makes so many parts.

    More parts than there are pieces are of no use.
    """
    count = max(1, -(-max((int(size.sum()) for size in sizes), default=0) // (most * unit)))
    limit = max((len(size) for size in sizes), default=1)
    while count < limit:
        counted = zip(parts_of(count), sizes, strict=True)
        if all(np.bincount(part, size, 1).max() <= most for part, size in counted):
            break
        count += max(1, count // 16)
    return count


def _offsets(
    sizes: NDArray[np.int64], part: NDArray[np.int64], count: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(Where each piece begins in its part [P], the parts' sizes [count]); parts come in order."""
    before = np.cumsum(sizes) - sizes
    totals = np.bincount(part, sizes, count).astype(np.int64)
    begins = np.cumsum(totals) - totals
    return before - begins[part], totals


def turns(pieces: list[Boxes]) -> list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each rank (its number among those that hold the same piece [P], how many they are [P])."""
    same, count = alike(np.concatenate(pieces))
    order = np.argsort(same, kind="stable")  # ranks in order among the same
    begins = np.cumsum(count) - count
    turn = np.empty(len(same), dtype=np.int64)
    turn[order] = np.arange(len(same)) - begins[same[order]]
    ends = np.cumsum([len(p) for p in pieces])[:-1]
    return list(zip(np.split(turn, ends), np.split(count[same], ends), strict=True))


def alike(rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For rows [N, C] of numbers from 0 on: (the number of each among those that differ [N], how many are of each). By
    keys of one number, which are sorted ten times as fast as rows are.
    """
    key, size = np.zeros(len(rows), dtype=np.int64), 1
    for column in rows.T:
        width = int(column.max(initial=0)) + 1
        if size * width >= 1 << 63:
            key, size = _renumbered(key)
        if size * width >= 1 << 63:
            column, width = _renumbered(column)
        key, size = key * width + column, size * width
    _, same, count = np.unique(key, return_inverse=True, return_counts=True)
    return same, count


def _renumbered(numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """The same order without gaps, and how many there are."""
    unlike, renumbered = np.unique(numbers, return_inverse=True)
    return renumbered, len(unlike)
