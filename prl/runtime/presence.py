"""Whether the directory of a run is still its own while it runs: who deletes it wants neither the run nor remains, and
may have given the same place to another one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from prl.config.errors import UserError
from prl.runtime.process.failures import Failure

LOOK_INTERVAL_S = 1.0


class Presence:
    """Of one run directory, which `is_ours` looks at."""

    def __init__(self, path: Path, is_ours: Callable[[], bool]) -> None:
        self.path, self.is_ours = path, is_ours
        self.looked_s = time.monotonic()
        self.is_lost = self.was_missed = False

    def find_loss(self, at_once: bool = False) -> Failure | None:
        """What to tell when it is gone at two looks in a row, or now: `at_once`, where something else has failed."""
        if time.monotonic() - self.looked_s >= LOOK_INTERVAL_S or at_once:
            missed, self.looked_s = not self.is_ours(), time.monotonic()
            self.is_lost |= missed and (self.was_missed or at_once)
            self.was_missed = missed
        return self._failure() if self.is_lost else None

    def _failure(self) -> Failure:
        error = UserError(
            "the run's directory was deleted or moved away while it ran",
            where=str(self.path),
            why="without it nothing of the run can be kept",
            fix="the same command starts anew; to end a run: Ctrl-C, or python -m prl.cancel",
        )
        parts = {"what": error.what, "where": error.where, "why": error.why, "fix": error.fix}
        return Failure("config", "root", 0, 0, error.what, str(self.path), user_error=parts)
