"""Checkpoints committed beside the work: one after another in a thread, each step once, watched by their progress."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from prl.runtime.directory.checkpoints import commit

POLL_S = 0.05


class CommitStalled(TimeoutError):
    """The disk takes no more. Its class of failure is `hang`."""


class Committer:
    """The commits of one run. Whoever asks again for a step gets the answer of the first time."""

    def __init__(self, run_dir: Path, keep: int, parts: tuple[str, ...], hang_timeout_s: float) -> None:
        """`hang_timeout_s`: without any progress for so long, a commit has failed. There is no other limit."""
        self.run_dir, self.keep, self.parts, self.hang_timeout_s = run_dir, keep, parts, hang_timeout_s
        self.thread = ThreadPoolExecutor(1, "commit")
        self.lock = threading.Lock()
        self.commits: dict[int, Future[float]] = {}  # -> the seconds that it took
        self.moved_s = time.monotonic()

    def start(
        self,
        step: int,
        in_haste: bool = False,
        prepare: Callable[[], None] = lambda: None,
        held: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Commit what is staged for `step`, as soon as it is not `held`. Returns whether it was not asked for before;
        only then `prepare` is called, to add to it what is missing. `in_haste`: as `commit` has it.
        """
        with self.lock:
            if step in self.commits:
                return False
            prepare()
            if self.is_idle:
                self.moved()
            self.commits[step] = self.thread.submit(self._commit, step, held, in_haste)
            return True

    def _commit(self, step: int, held: Callable[[], bool], in_haste: bool) -> float:
        while held():
            self.moved()
            time.sleep(POLL_S)
        started_s = time.monotonic()
        commit(self.run_dir, step, self.keep, self.parts, self.moved, in_haste)
        return time.monotonic() - started_s

    def moved(self) -> None:
        """There was progress."""
        self.moved_s = time.monotonic()

    @property
    def is_idle(self) -> bool:
        return all(done.done() for done in self.commits.values())

    def is_done(self, step: int | None = None) -> bool:
        """Whether the checkpoint of `step`, or of all steps that were asked for, is committed.

        Raises what a commit raised, and CommitStalled when there was no progress for hang_timeout_s.
        """
        asked = self.commits.values() if step is None else [self.commits[step]] if step in self.commits else []
        for future in asked:
            if future.done():
                future.result()
        done = all(future.done() for future in asked) and (step is None or step in self.commits)
        if not done and not self.is_idle and time.monotonic() - self.moved_s > self.hang_timeout_s:
            raise CommitStalled(f"the commit of a checkpoint stands still for {self.hang_timeout_s:g} s")
        return done

    def took(self, step: int, wait_s: float = 0.0) -> float | None:
        """The seconds that the commit of `step` has taken; None if it does not end within `wait_s`. Raises as
        `is_done` does.
        """
        if wait_s and step in self.commits:
            futures.wait([self.commits[step]], wait_s)
        return self.commits[step].result() if self.is_done(step) else None
