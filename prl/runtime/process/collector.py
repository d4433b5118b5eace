"""Python's cyclic garbage collector, when a loop can spare the time.

By itself it looks through everything that lives, once in a while and in the middle of something: it held an event loop
with hundreds of rollouts under way, and one trainer rank while all others waited for it. Here only what is young is
looked through unasked, little at a time; all of it when `everything` is called.
"""

from __future__ import annotations

import gc
import time
from typing import Literal

# objects made since the last time, and of the second generation collections of the first, until it is its turn
IN_SMALL_PIECES = 300, 1  # 2 ms at most with 1,024 rollouts under way, where (700, 3) took 18
SELDOM = 700, 3
NEVER = 1 << 30
FULL_EVERY, FULL_AFTER_S = 50, 60.0  # steps; or seconds, where a step takes longer than the collection does
FIRST = 2  # steps, in which compilers leave much


class Collector:
    """This process's, from `begin` on; and what collections took, for the metrics."""

    def __init__(self) -> None:
        self.seconds = self.longest_s = self._started = 0.0
        self.steps, self.full_at = 0, 0.0

    def begin(self, when: tuple[int, int] = SELDOM) -> None:
        """Leave out what there is now for good, and collect as above from here on."""
        self.everything()
        gc.freeze()
        gc.set_threshold(*when, NEVER)
        gc.callbacks.append(self._note)

    def end(self) -> None:
        """Let Python go on as it does by itself."""
        gc.callbacks.remove(self._note)
        gc.set_threshold(700, 10, 10)

    def everything(self) -> None:
        gc.collect()
        self.full_at = time.monotonic()

    def is_due(self, step: int) -> bool:
        """Whether it is time for `everything`: in the same steps on all ranks, where steps are short."""
        return step % FULL_EVERY == 0 or time.monotonic() - self.full_at > FULL_AFTER_S

    def step(self, step: int) -> None:
        """Where a step of training can spare the time: `everything`, now and then."""
        self.steps += 1
        if self.steps <= FIRST or self.is_due(step):
            self.everything()

    def row(self) -> dict[str, float]:
        """Seconds that all collections computed since it was asked last, and the longest."""
        row = {"gc_s": self.seconds, "gc_longest_s": self.longest_s}
        self.seconds = self.longest_s = 0.0
        return row

    def _note(self, phase: Literal["start", "stop"], info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.thread_time()
        else:
            took_s = time.thread_time() - self._started
            self.seconds += took_s
            self.longest_s = max(self.longest_s, took_s)
