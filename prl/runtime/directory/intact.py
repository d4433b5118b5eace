"""Directories that are made once, in cache_dir, and used by many runs: with a list of their files, by which damage is
found before anybody begins with it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from prl.config.errors import PassingError
from prl.runtime.directory.checkpoints import MANIFEST, find_damage, write_manifest, write_sizes
from prl.runtime.directory.files import PARTIAL, is_full_disk, unreadable

CHECKED_BYTES = 8 << 30  # of a directory with more, which takes seconds to read, files count if they have their sizes


def seal(path: Path) -> None:
    """List what is in it, once it is complete."""
    nbytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    write_sizes(path) if nbytes > CHECKED_BYTES else write_manifest(path)


def drop_damaged(path: Path, what: str, note: Callable[[str], None]) -> None:
    """Remove a directory whose files are not as they were written, so that it is made again. One without a list, of an
    earlier version, is taken as it is.

    Raises UserError where that cannot be told, since it cannot be read.
    """
    try:
        listed = (path / MANIFEST).is_file()
        damage = find_damage(path, ()) if listed else None
    except OSError as error:
        raise unreadable(path, error) from error
    if damage is None:
        return
    note(f"{what}: damaged in the cache, made again ({damage})")
    doomed = path.with_name(f"{path.name}.{os.getpid()}.old{PARTIAL}")
    with contextlib.suppress(FileNotFoundError):  # another run was first
        os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


@contextlib.contextmanager
def filling(path: Path) -> Iterator[None]:
    """While it is written: raises UserError, for the place that it is, when the disk is full."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise PassingError(
            f"The disk is full: {path} could not be written.",
            where=f"cache_dir={path.parent.parent}",
            why="no space left on the device, or a quota is exceeded",
            fix="free space there, or another cache_dir; the same command, a sweep's too, goes on",
        ) from error
