"""How long the orchestrator's event loop was held by one thing, while requests, rollouts and signals waited for it."""

from __future__ import annotations

import asyncio
import time

LOOK_S = 0.005


class LoopWatch:
    """Looks every few milliseconds, and notes by how much it came too late."""

    def __init__(self) -> None:
        self.late_s = self.busy_s = 0.0

    async def follow(self) -> None:
        """For ever."""
        while True:
            due_s, used_s = time.perf_counter() + LOOK_S, time.thread_time()
            await asyncio.sleep(LOOK_S)
            late_s = time.perf_counter() - due_s
            self.late_s = max(self.late_s, late_s)
            self.busy_s = max(self.busy_s, min(late_s, time.thread_time() - used_s))

    def take(self) -> tuple[float, float]:
        """The longest since it was asked last: in all, and as far as this thread was computing, and did not wait for
        other threads or for a machine that had other work.
        """
        longest = self.late_s, self.busy_s
        self.late_s = self.busy_s = 0.0
        return longest
