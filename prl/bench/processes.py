"""Processes of a benchmark, each with a pipe. One that dies ends the benchmark, in words."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from typing import Any, Literal, Self

from prl.config.errors import UserError
from prl.runtime.process.guards import die_with_parent


def _begin(parent: int, target: Callable[..., None], *args: Any) -> None:
    """In the process: `target`, for as long as the benchmark lives."""
    die_with_parent(parent)
    target(*args)


def _leave(number: int, _: object) -> None:
    sys.exit(128 + number)


class Processes:
    """A context manager: on leaving it none of them is left.

    Attributes:
        pipes: to each, in the order of `start`.
    """

    def __init__(self, method: Literal["fork", "spawn"], daemon: bool = True) -> None:
        """fork: of a process that has imported everything, so that they share it. daemon: none starts others itself."""
        self.context: Any = multiprocessing.get_context(method)
        self.daemon = daemon
        self.on_term: Any = None
        self.started: list[Any] = []
        self.pipes: list[Connection] = []

    def start(self, name: str, target: Callable[..., None], *args: Any) -> int:
        """Call `target(*args, pipe)` in a process. Returns its index."""
        ours, theirs = self.context.Pipe()
        whole = (os.getpid(), target, *args, theirs)
        process = self.context.Process(target=_begin, args=whole, name=name, daemon=self.daemon)
        process.start()
        theirs.close()
        self.started.append(process)
        self.pipes.append(ours)
        return len(self.started) - 1

    def hear(self, index: int) -> Any:
        """What one says next. Raises UserError when one has died, or ended before it has said it."""
        pipe = self.pipes[index]
        while not pipe.poll():
            # those that have failed, too: one may have done so since the last look at it
            wait([pipe, *(process.sentinel for process in self.started if process.exitcode != 0)])
            self.check()
        try:
            return pipe.recv()
        except (EOFError, ConnectionError):
            self.started[index].join()
            raise self._ended(self.started[index]) from None

    def tell(self, indices: Iterable[int], what: Any) -> None:
        """Raises UserError when one has died."""
        for index in indices:
            try:
                self.pipes[index].send(what)
            except ConnectionError:
                self.started[index].join()
                raise self._ended(self.started[index]) from None

    def check(self) -> None:
        """Raises UserError when one has died."""
        for process in self.started:
            if process.exitcode:
                raise self._ended(process)

    def _ended(self, process: Any) -> UserError:
        code = process.exitcode
        return UserError(
            "A process of the benchmark has ended before its time.",
            where=process.name,
            why=f"{signal.Signals(-code).name if code < 0 else f'exit code {code}'}; what it said itself is above",
            fix="a smaller size where memory did not suffice; else a report of what it said",
        )

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.on_term = signal.signal(signal.SIGTERM, _leave)  # by way of `__exit__`, and of temporary directories
        return self

    def __exit__(self, *_: object) -> None:
        if self.on_term is not None:
            signal.signal(signal.SIGTERM, self.on_term)
        for process in self.started:
            process.kill()
            process.join()
