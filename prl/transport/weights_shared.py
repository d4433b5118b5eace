"""Weights in POSIX shared memory: each trainer rank keeps its part in a segment, and engines on the host map all."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from prl.config.errors import PassingError, UserError
from prl.transport.boxes import TENSOR, Table
from prl.transport.buckets import Announce
from prl.transport.flat import ALIGN
from prl.transport.shelves import Assembly, Gather, Keeper, Shelf, alone, pack_head, read_head


class SharedMemoryPublisher(Keeper):
    """One trainer rank's: a segment per version.

    Its name is unlinked when the version is acknowledged, so memory lives only as long as somebody maps it. A name
    left by a killed run is the root's to remove (it has given it).
    """

    def __init__(self, prefix: Path, rank: int = 0, gather: Gather = alone) -> None:
        super().__init__(rank, gather)
        self.prefix = prefix
        self.path: Path | None = None  # of the version that is held

    def publish(self, version: int, parts: Iterable[Tensor], announce: Announce) -> None:
        """`parts`: of each box that this rank holds. The first rank announces. A collective.

        Raises UserError where there is no room, PassingError when others take it.
        """
        if self.path is not None:
            self.acknowledge()
        # a name of its own, so that a late engine finds its version or none
        self.path = segment_of(f"{self.prefix}-{version}", self.rank)
        begin = aligned(len(self._head(np.zeros(len(self.shelf.parcels), dtype=np.uint32))))
        table = self.shelf.table
        whole = int(table.nbytes(table.whole()).sum())
        buffer = _make_segment(self.path, begin + self.shelf.nbytes, version, whole)
        sums = self.shelf.fill(buffer, self.kept(parts), begin)
        head = self._head(sums)
        buffer[: len(head)] = head
        ranks = len(self.gather(b""))  # all others have written theirs by now
        if self.rank == 0:
            path = f"{self.prefix}-{version}"
            announce({"type": "shared_memory", "path": path, "version": version, "ranks": ranks})

    def _head(self, sums: NDArray[np.uint32]) -> bytes:
        return pack_head(self.shelf, sums, b"", with_table=self.rank == 0)

    def acknowledge(self) -> None:
        """A collective: the first rank knows when engines have it."""
        self.gather(b"")
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def segment_of(path: str, rank: int) -> Path:
    """Of a version whose segments are called so."""
    return Path(f"{path}-{rank}")


def _make_segment(path: Path, size: int, version: int, whole: int) -> mmap.mmap:
    """Of `size` bytes for this rank's part; `whole`: those of all ranks."""
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b") as file:
        try:
            # so that a full /dev/shm is an error here, not a SIGBUS later
            os.posix_fallocate(file.fileno(), 0, size)
        except OSError as error:
            path.unlink()
            raise _kind_of_shortage(path, whole)(
                f"{size} bytes of shared memory for weights version {version} are not to be had, of {whole} that all "
                f"trainer ranks need: {error}",
                where=str(path),
                why="weight_transport=shared_memory holds a whole copy of the weights in /dev/shm",
                fix="enlarge /dev/shm, or use weight_transport=filesystem",
            ) from error
        return mmap.mmap(file.fileno(), size)


def _kind_of_shortage(path: Path, size: int) -> type[UserError]:
    """Whether others take the room, who may leave, or the place is too small for so many bytes even when empty."""
    place = os.statvfs(path.parent)
    return PassingError if size < place.f_blocks * place.f_frsize else UserError


def aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


@dataclass(frozen=True)
class Segment:
    """What one rank has written, mapped."""

    buffer: mmap.mmap
    shelf: Shelf
    begin: int  # of the shelf
    said: bytes


def map_shared(update_info: dict[str, Any], verify: bool) -> list[Segment]:
    """Raises as `map_segment` does."""
    segments: list[Segment] = []
    for rank in range(update_info["ranks"]):
        path, table = segment_of(update_info["path"], rank), segments[0].shelf.table if segments else None
        segments.append(map_segment(path, table, verify))
    return segments


def map_segment(path: Path, table: Table | None, verify: bool) -> Segment:
    """`table`: the first segment's, None where this is the first. Raises OSError where it is gone, ValueError where it
    is damaged.
    """
    with path.open("r+b") as file:
        buffer = mmap.mmap(file.fileno(), 0)
    shelf, sums, said = read_head(buffer.read, table)
    begin = aligned(buffer.tell())
    if begin + shelf.nbytes > len(buffer):
        raise ValueError(f"{path} is too short for what it says is in it")
    if verify and shelf.damaged(buffer, sums, begin):
        raise ValueError(f"{path} is damaged: CRC-32 of a parcel is another than as written")
    return Segment(buffer, shelf, begin, said)


def receive_shared(update_info: dict[str, Any], verify: bool) -> Iterator[tuple[str, Tensor]]:
    """Raises as `map_segment` does."""
    return tensors_of(map_shared(update_info, verify))


def tensors_of(segments: list[Segment]) -> Iterator[tuple[str, Tensor]]:
    """One tensor after another: where it is if one rank has all of it, else put together."""
    table = segments[0].shelf.table
    parts: dict[int, list[tuple[list[int], Tensor]]] = {}
    for segment in segments:
        for box, offset in zip(segment.shelf.boxes.tolist(), segment.shelf.offsets.tolist(), strict=False):
            place = segment.begin + offset
            parts.setdefault(box[TENSOR], []).append((box, segment.shelf.view(segment.buffer, box, place)))
    for number, (name, rows, columns) in enumerate(zip(table.names, table.rows, table.columns, strict=True)):
        found, into = parts.pop(number, []), Assembly(table)
        if len(found) == 1 and found[0][0][1:] == [0, rows, 0, columns]:
            yield name, found[0][1].view(table.shapes[number])
            continue
        for box, data in found:
            into.put(box, data)
        yield name, into.take(number)
