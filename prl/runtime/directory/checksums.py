"""Checksums of files that are too large for one thread: pieces of all of them, side by side, in the order of reading.

zlib.crc32 and reads let go of the interpreter's lock, so threads do.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

PIECE_BYTES = 64 << 20  # one checksum for each
CHUNK_BYTES = 1 << 20  # of one read
MAX_THREADS = 16


def piece_checksums(
    paths: Iterable[Path], sync: bool = False, moved: Callable[[], None] = lambda: None
) -> Iterator[list[int]]:
    """CRC-32 of each piece of PIECE_BYTES of each file, file by file as they are given.

    Args:
        sync: have each file on disk, not only in memory, before it is read.
        moved: called, from any thread, whenever a piece is done: a sign of life.

    Raises OSError for a file that cannot be read; a file that shrinks meanwhile has other pieces.
    """
    paths = list(paths)
    with ThreadPoolExecutor(num_threads(), "checksum") as pool:
        try:
            yield from _in_order(pool, paths, sync, moved)
        finally:
            pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ThreadPoolExecutor, paths: list[Path], sync: bool, moved: Callable[[], None]
) -> Iterator[list[int]]:
    synced = [pool.submit(sync_file, path) for path in paths] if sync else []
    for done in synced:
        done.result()
        moved()
    pieces: list[list[Future[int]]] = []
    for path in paths:
        starts = range(0, max(path.stat().st_size, 1), PIECE_BYTES)
        pieces.append([pool.submit(_crc32, path, start, moved) for start in starts])
    for of_file in pieces:
        yield [piece.result() for piece in of_file]


def num_threads() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_THREADS, 2 * cores)  # half of them wait for the disk


def whole_checksum(path: Path) -> int:
    """CRC-32 of a whole file, as manifests of earlier versions have it."""
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def sync_file(path: Path) -> None:
    """fsync of a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _crc32(path: Path, start: int, moved: Callable[[], None]) -> int:
    value, left = 0, PIECE_BYTES
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left and (read := file.readinto(buffer[: min(left, CHUNK_BYTES)])):
            value = zlib.crc32(buffer[:read], value)
            left -= read
    moved()
    return value
