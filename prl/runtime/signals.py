"""Signals to the root: the handler only counts; the supervisor's loop acts."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)  # USR2: a scheduler's warning


class StopSignals:
    """Installed while a run lives. The first signal asks for an orderly stop, the second ends everything at once."""

    def __init__(self) -> None:
        self.first: int | None = None
        self.count = 0
        self._before: dict[int, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells have it: 130 for SIGINT, 143 for SIGTERM."""
        assert self.first is not None
        return 128 + self.first

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._count)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _count(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or number
        self.count += 1
