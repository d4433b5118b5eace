"""The engine's thread: runs steps, carries out control jobs between them, and hands results to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from prl.inference.engine import TorchEngine
from prl.inference.sequences import Request, Sequence

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
IDLE_WAIT_S = 0.1


class EngineDead(RuntimeError):
    """The engine's thread ended with an exception; nothing can be served any more."""


class EngineWorker:
    """All access to the engine goes through here; methods are called from the event loop."""

    def __init__(self, engine: TorchEngine, beat: Callable[[], None]) -> None:
        self.engine, self.beat = engine, beat
        self.loop = asyncio.get_running_loop()
        self.wake = threading.Condition()
        self.jobs: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self.results: dict[Sequence, asyncio.Future[Sequence]] = {}
        self.frozen = False  # pause mode keep: nothing moves
        self.admitting = True  # pause mode wait: running ones finish, new ones wait outside
        self.held: list[tuple[Request, asyncio.Future[list[Sequence]]]] = []  # arrived while paused
        self.asleep = False
        self.stopping = False
        self.error: BaseException | None = None
        self.arrivals = 0
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    # --- from the event loop ------------------------------------------------------------------------------------------

    async def generate(self, request: Request) -> list[Sequence]:
        """All n completions of a request. Raises ValueError for a bad one, EngineDead. Cancelling aborts it."""
        sequences: list[Sequence] = []
        try:
            if self.paused:  # admitted on resume in order of request id: what is computed must not depend on arrival
                released: asyncio.Future[list[Sequence]] = self.loop.create_future()
                self.held.append((request, released))
                sequences = await released
            else:
                request.arrival = self.arrivals = self.arrivals + 1
                sequences = await self.run(lambda: self._add(request))
            return list(await asyncio.gather(*(self.results[s] for s in sequences)))
        except asyncio.CancelledError:
            self.held = [(r, f) for r, f in self.held if r is not request]
            if sequences and self.error is None:
                await self.run(lambda: self._abort(sequences))
            raise
        finally:
            for sequence in sequences:
                self.results.pop(sequence, None)

    async def run(self, job: Callable[[], T]) -> T:
        """Carry out `job` on the engine's thread between two steps."""
        if self.error is not None:
            raise EngineDead(f"the engine died: {self.error}") from self.error
        future: asyncio.Future[T] = self.loop.create_future()
        with self.wake:
            self.jobs.append((job, future))
            self.wake.notify()
        return await future

    @property
    def paused(self) -> bool:
        return self.frozen or not self.admitting

    @property
    def num_waiting(self) -> int:
        return len(self.engine.waiting) + sum(request.params.n for request, _ in self.held)

    async def pause(self, mode: PauseMode) -> None:
        """abort: end all requests now; wait: let them finish; keep: freeze them. New requests are held back in each case."""
        self.admitting = False
        if mode == "keep":
            self.frozen = True
            await self.run(lambda: None)  # the step under way is over
        elif mode == "abort":
            await self.abort(None)
        else:
            while self.engine.busy and self.error is None:
                await asyncio.sleep(0.005)

    async def resume(self) -> None:
        held, self.held = sorted(self.held, key=lambda item: (item[0].priority, item[0].request_id)), []
        for request, _ in held:
            request.arrival = self.arrivals = self.arrivals + 1

        def add_all() -> list[list[Sequence]]:
            added = [self._add(request) for request, _ in held]
            self.frozen = False
            return added

        self.admitting = True
        for (_, released), sequences in zip(held, await self.run(add_all), strict=True):
            if not released.done():
                released.set_result(sequences)

    async def abort(self, request_ids: list[str] | None) -> int:
        """End requests (None: all) with finish_reason "abort"; returns how many."""
        chosen = [s for s in self.results if request_ids is None or s.request.request_id in request_ids]
        await self.run(lambda: self._abort(chosen))
        held = [(r, f) for r, f in self.held if request_ids is None or r.request_id in request_ids]
        self.held = [item for item in self.held if item not in held]
        for request, released in held:  # never started: an empty completion
            aborted = [Sequence(request, i, 0, list(request.prompt_ids), finish_reason="abort") for i in range(request.params.n)]
            for sequence in aborted:
                self.results[sequence] = self.loop.create_future()
                self.results[sequence].set_result(sequence)
            released.set_result(aborted)
        return len({s.request.request_id for s in chosen}) + len(held)

    def stop(self) -> None:
        with self.wake:
            self.stopping = True
            self.wake.notify()
        self.thread.join(timeout=5)

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def _add(self, request: Request) -> list[Sequence]:
        sequences = self.engine.add(request)
        for sequence in sequences:
            self.results[sequence] = self.loop.create_future()
        return sequences

    def _abort(self, sequences: list[Sequence]) -> None:
        alive = [s for s in sequences if s.finish_reason is None]
        self.engine.abort(alive)
        self.loop.call_soon_threadsafe(self._deliver, alive)

    def _deliver(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            future = self.results.get(sequence)
            if future is not None and not future.done():
                future.set_result(sequence)

    def _run(self) -> None:
        try:
            while not self.stopping:
                self.beat()
                self._carry_out_jobs()
                if self.frozen or self.asleep or not self.engine.busy or not self.engine.has_weights:
                    with self.wake:
                        if not self.jobs and not self.stopping:
                            self.wake.wait(IDLE_WAIT_S)
                    continue
                finished = self.engine.step()
                if finished:
                    self.loop.call_soon_threadsafe(self._deliver, finished)
                time.sleep(0)  # let the event loop have the interpreter
        except BaseException as error:
            self.error = error
            self.loop.call_soon_threadsafe(self._fail_all, error)

    def _carry_out_jobs(self) -> None:
        with self.wake:
            jobs, self.jobs = self.jobs, []
        for job, future in jobs:
            try:
                result, error = job(), None
            except Exception as caught:  # the caller's to handle: a bad request, a damaged weight file
                result, error = None, caught
            self.loop.call_soon_threadsafe(_settle, future, result, error)

    def _fail_all(self, error: BaseException) -> None:
        dead = EngineDead(f"the engine died: {type(error).__name__}: {error}")
        pending = [future for _, future in self.jobs] + list(self.results.values()) + [f for _, f in self.held]
        for future in pending:
            if not future.done():
                future.set_exception(dead)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
