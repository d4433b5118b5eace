"""Signs of life, as files: `heartbeat/<role>` is touched by the child's main loop and holds one of STATES."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from prl.runtime.directory.files import replace_file

BEAT_INTERVAL_S = 0.5  # more frequent beats are not written
STARTING, READY, SAVING = STATES = ("starting", "ready", "saving")


def heartbeat_path(run_dir: Path, role_name: str) -> Path:
    return run_dir / "heartbeat" / role_name.replace("/", ".")


class Heart:
    """The child's side."""

    def __init__(self, run_dir: Path, role_name: str) -> None:
        self.path = heartbeat_path(run_dir, role_name)
        self.last_s = time.monotonic()
        self.saving = False
        self._write(STARTING)

    def beat(self) -> None:
        now = time.monotonic()
        if now - self.last_s >= BEAT_INTERVAL_S:
            self.last_s = now
            with contextlib.suppress(OSError):  # not worth a run
                os.utime(self.path)

    def ready(self) -> None:
        self._write(READY)

    def save(self, begins: bool) -> None:
        """A checkpoint is being written that a stop must wait for; or it is no longer."""
        if begins != self.saving:
            self.saving = begins
            with contextlib.suppress(OSError):  # a full disk is told by who writes the checkpoint
                self._write(SAVING if begins else READY)

    def _write(self, state: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, state, sync=False)


class Pulse:
    """The supervisor's side. Ages are measured on its own clock, from when it saw the file change."""

    def __init__(self, run_dir: Path, role_name: str) -> None:
        self.path = heartbeat_path(run_dir, role_name)
        self.path.unlink(missing_ok=True)
        self.started_s = self.changed_s = time.monotonic()
        self.ready = self.saving = False
        self.seen = (0, 0)

    def check(self) -> None:
        """Look at the file once."""
        try:
            stat = self.path.stat()
            if (stat.st_mtime_ns, stat.st_ino) != self.seen:
                self.seen, self.changed_s = (stat.st_mtime_ns, stat.st_ino), time.monotonic()
                state = self.path.read_text()
                self.ready, self.saving = self.ready or state != STARTING, state == SAVING
        except OSError:  # not there yet, or being replaced
            return

    def silent_s(self) -> float:
        """Seconds since the last sign of life."""
        return time.monotonic() - self.changed_s

    def age_s(self) -> float:
        return time.monotonic() - self.started_s
