"""Where the time of an update of engines' weights goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prl.orchestrator.engines.requests import PAUSE


def name_of(route: str) -> str:
    return route.partition("?")[0].rpartition("/")[2]


class UpdateClock:
    """Of the last update: seconds of each route, in the order in which they were asked."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.paused_s = 0.0  # from when engines were asked to pause until all had resumed
        self._paused_at = 0.0

    def begin(self) -> None:
        self.seconds = {}

    @contextmanager
    def timed(self, route: str) -> Iterator[None]:
        """All replicas at once. What is asked again adds up; what fails does not count."""
        started, name = time.perf_counter(), name_of(route)
        if route == PAUSE and name not in self.seconds:
            self._paused_at = started
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    @contextmanager
    def timed_alone(self, route: str) -> Iterator[None]:
        """One replica of several: the slowest counts."""
        started, name = time.perf_counter(), name_of(route)
        yield
        self.seconds[name] = max(self.seconds.get(name, 0.0), time.perf_counter() - started)

    def resumed(self) -> None:
        self.paused_s = time.perf_counter() - self._paused_at

    def row(self) -> dict[str, float]:
        """For the metrics, once engines have resumed."""
        routes = {f"weight_update/{name}_s": seconds for name, seconds in self.seconds.items()}
        return {"weight_update_s": sum(self.seconds.values()), "engines_paused_s": self.paused_s, **routes}
