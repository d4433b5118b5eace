"""A process of its own that ends everything of a run when the root is gone, however it went.

It holds the read end of a pipe whose write end only the root has: end of file means the root is gone. Three nets:
registered process groups; a marker in the environment, which descendants inherit; descendants seen earlier in /proc,
which holds for programs that leave their group and overwrite their environment. Run as a script: it imports nothing but
the standard library, and costs a few megabytes.

Commands on stdin, one a line: `+GROUP`, `-GROUP`, `status PATH`, `shm PREFIX`, `done`.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

MARKER = "PRL_RUN_MARKER"  # environment variable of every process of a run; random, not secret
SURVEY_INTERVAL_S = 1.0
KILL_TIMEOUT_S = 5.0
MAPS_INTERVAL_S = 1.0
SEGMENT = re.compile(rb"/dev/shm/psm_\w+")  # of multiprocessing.shared_memory, as vLLM's queues: 160 MiB each
SEMAPHORE = re.compile(rb" (\d+) +/dev/shm/sem\.")  # of multiprocessing; mapped under another name than it has: inode


class Reaper:
    """The root's side."""

    def __init__(self, marker: str, lock_fd: int | None) -> None:
        """`lock_fd`: the run directory's lock, which the reaper of the root holds until the last process is gone."""
        self.marker, self.lock_fd = marker, lock_fd
        self.told: list[str] = []
        self.process = self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", os.path.abspath(__file__), self.marker],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=() if self.lock_fd is None else (self.lock_fd,),
        )

    def revive(self) -> None:
        """If somebody killed it, start another one that knows as much. From the main thread only."""
        if self.process.poll() is not None:
            self.process = self._start()
            for command in self.told:
                self._write(command)

    def tell(self, command: str) -> None:
        self.told.append(command)
        self._write(command)

    def _write(self, command: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):  # it is dead; revive() follows
            self.process.stdin.write(os.fsencode(command) + b"\n")
            self.process.stdin.flush()

    def finish(self) -> None:
        """Sweep away what is left and end."""
        self.tell("done")
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(KILL_TIMEOUT_S + 1)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def process_table() -> dict[int, tuple[int, int]]:
    """pid -> (parent's pid, start time) of all living processes; empty where there is no /proc."""
    table = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
                if fields[0] not in (b"Z", b"X"):
                    table[int(name)] = (int(fields[1]), int(fields[19]))
    return table


def has_marker(pid: int, marker: str) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return f"{MARKER}={marker}".encode() in file.read().split(b"\0")
    return False


def segments_of(pids: Iterable[int]) -> set[bytes]:
    """Segments of shared memory, and semaphores, that processes have mapped."""
    found, inodes = set[bytes](), set[int]()
    for pid in pids:
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps", "rb") as file:
            maps = file.read()
            found |= set(SEGMENT.findall(maps))
            inodes |= set(map(int, SEMAPHORE.findall(maps)))
    for path in glob.glob(b"/dev/shm/sem.mp-*") if inodes else ():
        with contextlib.suppress(OSError):
            found |= {path} if os.stat(path).st_ino in inodes else set()
    return found


class Watch:
    """What the reaper knows about a run."""

    def __init__(self, marker: str) -> None:
        self.marker = marker
        self.groups: dict[int, int | None] = {}  # -> start time of the leader; None: it was gone when it was told
        self.seen: dict[int, int] = {}  # pid -> start time, of all descendants ever surveyed
        self.status_paths: list[str] = []
        self.shm_prefixes: list[str] = []
        self.segments: set[bytes] = set()  # mapped by a process of the run
        self.began_s = time.time()
        self.maps_read_s = float("-inf")
        self.orderly = False

    def obey(self, line: str) -> None:
        if line.startswith("+"):
            group = int(line[1:])
            self.groups.setdefault(group, process_table().get(group, (0, None))[1])
        elif line.startswith("-"):
            self.groups.pop(int(line[1:]), None)
        elif line.startswith("status "):
            self.status_paths.append(line[7:])
        elif line.startswith("shm "):
            self.shm_prefixes.append(line[4:])
        elif line == "done":
            self.orderly = True

    def survey(self) -> None:
        """Remember all living descendants of the registered processes."""
        table = process_table()
        self.seen = {pid: start for pid, start in self.seen.items() if table.get(pid, (0, -1))[1] == start}
        for group in [group for group in self.groups if self._is_taken(group, table)]:
            del self.groups[group]
        family = {*self.groups, *self.seen}
        grown = True
        while grown:
            children = {pid for pid, (parent, _) in table.items() if parent in family} - family
            family |= children
            grown = bool(children)
        self.seen |= {pid: table[pid][1] for pid in family if pid in table}
        if time.monotonic() - self.maps_read_s > MAPS_INTERVAL_S:
            self.read_maps()

    def read_maps(self) -> None:
        """Remember segments that nobody unlinks when their makers are killed."""
        self.maps_read_s = time.monotonic()
        self.segments |= segments_of(self.seen)

    def _is_taken(self, group: int, table: dict[int, tuple[int, int]]) -> bool:
        """Whether a registered group's number means another process now; while any of the group lives it does not."""
        start = self.groups[group]
        return group in table and start is not None and table[group][1] != start

    def _is_ours(self, pid: int) -> bool:
        start = process_table().get(pid, (0, -1))[1]
        return self.seen.get(pid) == start or has_marker(pid, self.marker)

    def _kill(self, pid: int) -> None:
        """SIGKILL, if the number still means the process that was found."""
        with contextlib.suppress(OSError, AttributeError):
            handle = os.pidfd_open(pid)
            try:
                if self._is_ours(pid):
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)
            return
        with contextlib.suppress(OSError):  # a system without such handles
            if self._is_ours(pid):
                os.kill(pid, signal.SIGKILL)

    def survivors(self) -> list[int]:
        """Living processes of the run, this one excepted."""
        self.survey()
        mine = os.getpid()
        return [pid for pid in process_table() if pid != mine and (pid in self.seen or has_marker(pid, self.marker))]

    def kill_all(self) -> None:
        """SIGKILL until nothing is left, for KILL_TIMEOUT_S at most."""
        deadline = time.monotonic() + KILL_TIMEOUT_S
        self.survey()
        self.read_maps()
        for group in self.groups:  # of which survey() has left out those whose number means another process now
            with contextlib.suppress(OSError):
                os.killpg(group, signal.SIGKILL)
        while time.monotonic() < deadline:
            survivors = self.survivors()
            if not survivors:
                break
            for pid in survivors:
                self._kill(pid)
            time.sleep(0.02)

    def clean_up(self) -> None:
        """Shared memory that nobody is left to unlink, and a status that nobody is left to write."""
        for path in (path for prefix in self.shm_prefixes for path in glob.glob(glob.escape(prefix) + "*")):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self.segments = {path for path in self.segments if os.path.exists(path)}
        used = segments_of(process_table()) if self.segments else set()
        for segment in self.segments - used:
            with contextlib.suppress(OSError):
                if os.stat(segment).st_ctime >= self.began_s:  # else it is one that the run was given to use
                    os.unlink(segment)
        for path in () if self.orderly else self.status_paths:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):  # a damaged one
                record_root_death(path)


ROOT_KILLED = "the root process was killed; every process of the run has been ended"


def record_root_death(path: str, kind: str = "node", message: str = ROOT_KILLED) -> None:
    """Make status.json true: the run has failed with its root. Raises OSError, or what a damaged one leads to."""
    with open(path) as file:
        status = json.load(file)
    if status["state"] in ("done", "failed", "stopped"):
        return
    status["state"] = "failed"
    status["failure"] = {"class": kind, "role": "root", "rank": 0, "node": 0, "message": message, "log_tail": []}
    status["updated"] = time.time()
    for role in status["roles"].values():
        role["state"] = "killed" if role["exit"] is None else role["state"]
    with contextlib.suppress(OSError):  # what is kept free on the disk for this
        os.unlink(os.path.join(os.path.dirname(path), ".status.reserve"))
    with open(path + ".reaper", "w") as file:
        json.dump(status, file, indent=1)
    os.replace(path + ".reaper", path)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    watch = Watch(sys.argv[1])
    pending = b""
    while True:
        readable, _, _ = select.select([0], [], [], SURVEY_INTERVAL_S)
        if readable:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                watch.obey(os.fsdecode(line))
        watch.survey()
    watch.kill_all()
    watch.clean_up()


if __name__ == "__main__":
    main()
