"""Who makes what several runs need, while the others wait for it: claims, as files on any file system that they share.

Claim N of a thing is the file THING.claim-N. It is made exclusively, so of several who try one succeeds, and whoever
made the one of the highest number has the thing to make. A holder shows life by rewriting its claim. One whose process
is gone, or that shows no life any more, is succeeded by claim N + 1.

No kernel locks: on file systems that nodes share they may hold on one node only, or for ever after its death. Should
two make the same thing for once (a holder was suspended, and woke up), that costs time and nothing else.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from prl.runtime.directory.files import parse_object
from prl.runtime.directory.identity import describe_process, find_process

BEAT_S = 5.0
SILENCE_LIMIT_S = 60.0  # of a holder on another machine: what NFS may keep of a file's old content, and more
MARK = ".claim-"


class Claim:
    """One process's view of who makes `thing`, and its own claim once it has one."""

    def __init__(self, thing: Path) -> None:
        self.thing = thing
        self.number: int | None = None  # of our own
        self.holder: dict[str, Any] = {}  # a record of the process that has it
        self._seen: tuple[int, bytes, int] | None = None  # the claim of others as it was, and since when
        self._seen_s = 0.0
        self._released = threading.Event()

    def take(self) -> bool:
        """Whether it is ours; ask again every now and then while it is not. Raises OSError."""
        newest = max(self._numbers(), default=-1)
        if newest >= 0 and not self._is_over(newest):
            return False
        try:
            fd = os.open(self._path(newest + 1), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:  # somebody was faster
            return False
        os.close(fd)
        self.number = newest + 1
        self._beat(0)
        threading.Thread(target=self._beat_on, name="claim", daemon=True).start()
        return True

    def release(self) -> None:
        """Ours, and those before it; others may take it at once."""
        self._released.set()
        if self.number is not None:
            for number in sorted(number for number in self._numbers() if number <= self.number):
                self._path(number).unlink(missing_ok=True)

    def _is_over(self, number: int) -> bool:
        """Whether the holder of a claim, which is not ours, makes the thing no more."""
        try:
            with self._path(number).open("rb") as file:  # opened anew, for NFS to ask its server
                seen = number, file.read(), os.fstat(file.fileno()).st_mtime_ns
        except FileNotFoundError:
            return False  # just released: the next look finds out
        if seen != self._seen:
            self._seen, self._seen_s = seen, time.monotonic()
            self.holder = parse_object(seen[1]) or self.holder
        where = find_process(parse_object(seen[1]))
        return where == "gone" or (where != "alive" and time.monotonic() - self._seen_s > SILENCE_LIMIT_S)

    def _numbers(self) -> list[int]:
        stem = self.thing.name + MARK
        names = [name.removeprefix(stem) for name in os.listdir(self.thing.parent) if name.startswith(stem)]
        return [int(name) for name in names if name.isdecimal()]

    def _path(self, number: int) -> Path:
        return self.thing.with_name(f"{self.thing.name}{MARK}{number}")

    def _beat_on(self) -> None:
        count = 0
        while not self._released.wait(BEAT_S):
            count += 1
            self._beat(count)

    def _beat(self, count: int) -> None:
        assert self.number is not None
        path = self._path(self.number)
        with contextlib.suppress(OSError):  # released meanwhile, or a full disk, and then the time alone changes
            os.utime(path)
            fd = os.open(path, os.O_WRONLY)
            try:
                content = json.dumps(describe_process() | {"beat": count}).encode()
                os.pwrite(fd, content, 0)
                os.ftruncate(fd, len(content))
            finally:
                os.close(fd)
