"""States of points, by what lies in their directories, and who has one in hand on this machine."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from prl.config.schema import RunConfig
from prl.runtime.directory.files import is_held
from prl.runtime.directory.rundir import is_locked
from prl.runtime.directory.status_file import read_status
from prl.runtime.evaluated import why_outdated
from prl.runtime.process.failures import is_refusal, waits_for_people

TAKEN = ".taken"  # in the sweep's directory: a locked file for each point that a sweep on this machine has in hand
TAKE_WAIT_S = 0.5  # for those who only look whether a point is taken
PointState = Literal["missing", "active", "unfinished", "refused", "failed", "done"]


def state_of(path: Path, queued: Iterable[Path] = ()) -> PointState:
    """What a point needs: nothing (done; active: it runs or is queued), a first start, to go on, another try (refused),
    or a person.
    """
    return "active" if path in queued or is_taken(path) else state_in(path)


def what_it_needs(path: Path, config: RunConfig, queued: Iterable[Path] = ()) -> PointState:
    """As `state_of`, where words may mean another policy by now: an evaluation of one that has changed is to be made
    anew.
    """
    return renewed(state_of(path, queued), path, config)


def renewed(state: PointState, path: Path, config: RunConfig) -> PointState:
    """A state with that in view."""
    return "unfinished" if state == "done" and why_outdated(path, config) else state


def state_in(path: Path) -> PointState:
    """As `state_of`, by what lies in its directory alone."""
    if is_locked(path):
        return "active"
    status = read_status(path)
    if not status:
        return "missing"
    if status["state"] == "done":
        return "done"
    if waits_for_people(status):
        return "failed"
    return "refused" if is_refusal(status) else "unfinished"


# --- points in the hands of a sweep on this machine -------------------------------------------------------------------


def take(path: Path) -> int | None:
    """Take a point, so that no other sweep starts it. Returns a descriptor, to be closed when it has ended; None if
    another has it. Raises OSError.
    """
    file = _taken_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + TAKE_WAIT_S
    while not _try_lock(fd):
        if time.monotonic() > deadline:
            os.close(fd)
            return None
        time.sleep(0.02)
    return fd


@contextlib.contextmanager
def taken(path: Path) -> Iterator[bool]:
    """Whether we could take it; if so, it is ours meanwhile."""
    fd = take(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def is_taken(path: Path) -> bool:
    return is_held(_taken_file(path))


def _taken_file(path: Path) -> Path:
    return path.parent / TAKEN / path.name


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks: the run directory's own decides
        return True
    return True
