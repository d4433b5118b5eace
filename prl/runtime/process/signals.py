"""Signals to the root: the handler only counts; the supervisor's loop acts."""

from __future__ import annotations

import signal
import time
from types import FrameType, TracebackType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)  # USR2: a scheduler's warning


REPEAT_S = 3.0  # a scheduler may tell several times: the job, its step, each process
ONE_S = 0.5  # SIGTERM twice within that is one: coreutils' timeout tells its child, and then its process group


class StopSignals:
    """Installed while a run lives. The first signal asks for an orderly stop, the second ends everything at once.

    SIGHUP is never the second: a shell and the kernel both send it when a terminal closes. Nor is SIGTERM at once after
    another one, nor any SIGTERM with `scheduled`, where it is the scheduler's, which repeats it, and sends SIGKILL when
    it means that.
    """

    def __init__(self, scheduled: bool = False, repeated: tuple[int, ...] = (signal.SIGTERM,)) -> None:
        """`repeated`: the signals of which this is true, for a scheduler that has others than SIGTERM."""
        self.scheduled, self.repeated = scheduled, repeated
        self.first: int | None = None
        self.first_s = 0.0  # by time.monotonic
        self.count = 0
        self.terminated_s: float | None = None  # when SIGTERM came; of several within REPEAT_S the first
        self.time_to_end_s: float | None = None  # from SIGTERM to `deadline_s`, until somebody knows better
        self.deadline_s: float | None = None  # by time.monotonic: when all of the run must have ended
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
        is_schedulers = self.scheduled and number in self.repeated
        now = time.monotonic()
        if number in self.repeated and (self.terminated_s is None or now - self.terminated_s > REPEAT_S):
            self.terminated_s = now
            if self.scheduled and self.time_to_end_s is not None:
                self.deadline_s = now + self.time_to_end_s
        is_same = number == self.first == signal.SIGTERM and now - self.first_s < ONE_S
        if self.first is not None and (is_schedulers or is_same or number == signal.SIGHUP):
            return
        if self.first is None:
            self.first, self.first_s = number, now
        self.count += 1

    def hear(self, number: int, count: int, left_s: float | None) -> None:
        """What the agent of other roles was told where it runs: its `count`-th signal. What many are told at once is
        one signal. `left_s`: until it is killed there.
        """
        self.first = self.first or number
        self.count = max(self.count, count)
        if left_s is not None:
            self.deadline_s = min(self.deadline_s or float("inf"), time.monotonic() + left_s)

    def seconds_left(self) -> float:
        """Until all must have ended; infinity if nobody has said."""
        deadline_s = self.deadline_s  # another thread may take it back
        return float("inf") if deadline_s is None else deadline_s - time.monotonic()
