"""Run in a process of its own: how fast a directory's disk is and whether locks hold there, as one line of JSON.

Nothing stays behind. The directory need not exist: the nearest one above it that does is measured.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PIECE = 4 * 2**20
MOST_BYTES = 64 * 2**20
MOST_S = 2.0  # for writing; then fsync takes what it takes
NETWORK = frozenset((  # types in /proc/self/mountinfo
    "nfs", "nfs4", "cifs", "smb3", "smbfs", "lustre", "gpfs", "beegfs", "ceph", "9p", "afs", "panfs", "wekafs",
    "glusterfs", "pvfs2", "orangefs", "virtiofs", "fuse.sshfs", "fuse.glusterfs", "fuse.ceph", "fuse.juicefs",
    "fuse.gcsfuse", "fuse.s3fs", "fuse.weka", "fuse.seaweedfs",
))  # fmt: skip


def nearest(path: Path) -> Path:
    """The directory itself, or the first above it that is there: what is there and no directory is told for itself."""
    path = path.expanduser().absolute()
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path


def file_system(path: Path, mounts: str) -> str:
    """Its type, by /proc/self/mountinfo: of the mount that lies deepest above the path, the last one on top."""
    best, found = -1, "unknown"
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        point = before.split()[4].encode().decode("unicode_escape") if len(before.split()) > 4 else ""
        inside = point == "/" or path.as_posix() == point or path.as_posix().startswith(f"{point}/")
        if point and inside and len(point) >= best:
            best, found = len(point), after.split()[0]
    return found


@contextlib.contextmanager
def scratch(directory: Path) -> Iterator[Path]:
    """A file without a name of its own for long."""
    fd, name = tempfile.mkstemp(prefix=".prl-doctor-", dir=directory)
    os.close(fd)
    try:
        yield Path(name)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def speed(path: Path) -> dict[str, float]:
    """MB/s written, fsync included, and read again, from the disk where the system can be told to forget the file."""
    piece, written = os.urandom(PIECE), 0
    fd = os.open(path, os.O_RDWR)
    try:
        began = time.monotonic()
        while written < MOST_BYTES and time.monotonic() - began < MOST_S:
            written += os.write(fd, piece)
        os.fsync(fd)
        write_s = time.monotonic() - began
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(fd, 0, os.SEEK_SET)
        began, read = time.monotonic(), 0
        while data := os.read(fd, PIECE):
            read += len(data)
        read_s = time.monotonic() - began
    finally:
        os.close(fd)
    return {"write_mb_s": written / write_s / 1e6, "read_mb_s": read / max(read_s, 1e-9) / 1e6}


def locks_hold(path: Path) -> bool:
    """Whether a second process is refused a lock that this one holds."""
    with path.open("r+") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        child = os.fork()
        if child == 0:
            with path.open("r+") as wanted:
                try:
                    fcntl.flock(wanted, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os._exit(0)
                except OSError:
                    pass
            os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # what was written is removed
    directory = nearest(Path(sys.argv[1]))
    space = os.statvfs(directory)
    found: dict[str, Any] = {"directory": str(directory), "free_gib": space.f_bavail * space.f_frsize / 2**30}
    with contextlib.suppress(OSError):
        found["type"] = file_system(directory.resolve(), Path("/proc/self/mountinfo").read_text())
    found["network"] = found.get("type") in NETWORK
    try:
        if not directory.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with scratch(directory) as path:
            found |= speed(path) | {"locks": locks_hold(path)}
    except OSError as error:
        found["error"] = error.strerror or str(error)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
