"""The engine's thread: loads, runs steps, carries out control jobs between them, hands results to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from prl.inference.engine import TorchEngine
from prl.inference.sequences import Request, Sequence
from prl.models.text.chat import ChatRenderer

T = TypeVar("T")
PauseMode = Literal["abort", "wait", "keep"]
IDLE_WAIT_S = 0.1


class EngineUnavailable(RuntimeError):
    """The engine cannot serve this now: still loading, without weights, or dead."""


class EngineDied(EngineUnavailable):
    """While it had this request, or before."""


class SequenceFailed(RuntimeError):
    """The engine could not compute this request, and goes on without it."""


class EngineWorker:
    """All access to the engine goes through here. Methods are called from the event loop unless said otherwise.

    `load` runs first on the engine's thread; `settled` is set when it has returned, or when the thread has died. Before
    that, and after its death, calls raise EngineUnavailable.
    """

    def __init__(self, load: Callable[[], tuple[TorchEngine, ChatRenderer]], beat: Callable[[], None]) -> None:
        self.load, self.beat = load, beat
        self.loop = asyncio.get_running_loop()
        self.wake = threading.Condition()  # guards jobs, stopping and error
        self.jobs: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        self.stopping = False
        self.error: BaseException | None = None
        self.settled = asyncio.Event()
        self._loaded: tuple[TorchEngine, ChatRenderer] | None = None
        self.results: dict[Sequence, asyncio.Future[Sequence]] = {}  # the event loop's
        self.held: list[tuple[Request, list[Sequence]]] = []  # arrived while paused
        self.admitting = True  # False while paused: new requests are held
        self.keeps_salted = False  # an update in this pause leaves prefixes that have a salt findable
        self.frozen = False  # paused with mode keep: running ones stand still too; the engine thread's
        self.arrivals = 0
        self.thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.thread.start()

    # --- state --------------------------------------------------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        return self._loaded is not None and self.error is None

    @property
    def engine(self) -> TorchEngine:
        """Raises EngineUnavailable while loading and after death."""
        return self._need()[0]

    @property
    def renderer(self) -> ChatRenderer:
        """Raises EngineUnavailable as `engine` does."""
        return self._need()[1]

    def _need(self) -> tuple[TorchEngine, ChatRenderer]:
        if self.error is not None:
            raise _death(self.error)
        if self._loaded is None:
            raise EngineUnavailable("the model is still loading")
        return self._loaded

    @property
    def paused(self) -> bool:
        return not self.admitting

    @property
    def counts(self) -> tuple[int, int]:
        """Sequences (running, waiting): as in vLLM those in prefill run; those held, queued or on their way wait."""
        running = len(self.engine.cache.in_use)  # read once, so that the sum is right while the engine moves on
        return running, max(len(self.results) - running, 0)

    @property
    def num_requests(self) -> int:
        """Requests that have not been answered, held ones included."""
        return len({id(sequence.request) for sequence in self.results})

    # --- requests -----------------------------------------------------------------------------------------------------

    async def generate(self, request: Request, prepared: list[Sequence] | None = None) -> list[Sequence]:
        """All n completions of a request. Raises ValueError for a bad one, EngineUnavailable,
        SequenceFailed. Cancelling aborts it.

        Args:
            prepared: the sequences that the engine prepared for it, for a caller who wants to see them grow.
        """
        engine = self.engine
        sequences = engine.prepare(request) if prepared is None else prepared
        if not engine.has_weights:
            raise EngineUnavailable("no weights since a restart, /sleep?level=2 or a failed update: update them first")
        futures = [self.results.setdefault(s, self.loop.create_future()) for s in sequences]
        try:
            if self.paused:  # admitted on resume in order of request id, so that results do not depend on arrival
                self.held.append((request, sequences))
            else:
                request.arrival = self.arrivals = self.arrivals + 1
                self._post(lambda: engine.submit(sequences))
            completed = list(await asyncio.gather(*futures))
            if error := next((s.error for s in completed if s.error is not None), None):
                raise SequenceFailed(f"this request failed in the engine: {error}")
            return completed
        except asyncio.CancelledError:
            self.held = [item for item in self.held if item[0] is not request]
            self._post(lambda: self._abort(sequences))
            raise
        finally:
            for sequence in sequences:
                del self.results[sequence]

    async def abort(self, request_ids: list[str] | None) -> int:
        """End requests (None: all) with finish_reason "abort" and what they have so far; returns how many."""
        chosen = [s for s in self.results if request_ids is None or s.request.request_id in request_ids]
        self.held = [item for item in self.held if item[1][0] not in chosen]
        await self.run(lambda: self._abort(chosen))
        return len({s.request.request_id for s in chosen})

    # --- control ------------------------------------------------------------------------------------------------------

    async def run(self, job: Callable[[], T]) -> T:
        """Carry out `job` on the engine's thread between two steps, after all that was asked before."""
        return await self._post(job)

    async def pause(self, mode: PauseMode, clear_cache: bool = True) -> None:
        """abort: end all requests now; wait: let them finish; keep: freeze them. New requests are held back.

        clear_cache: whether an update of the weights in this pause forgets all prefixes, those with a salt too.
        """
        self.admitting, self.keeps_salted = False, not clear_cache
        await self.run(lambda: setattr(self, "frozen", mode == "keep"))  # as a job: in order with those of `resume`
        if mode == "abort":
            await self.abort(None)
        elif mode == "wait":
            while await self.run(lambda: self.engine.busy) and self.paused:
                await asyncio.sleep(0.005)

    async def resume(self) -> None:
        """Go on, and admit what arrived meanwhile in order of priority and request id, all before the next step."""
        held, self.held = sorted(self.held, key=lambda item: (item[0].priority, item[0].request_id)), []
        for request, _ in held:
            request.arrival = self.arrivals = self.arrivals + 1

        def admit() -> None:
            for _, sequences in held:
                self.engine.submit(sequences)
            self.frozen = False

        self.admitting, self.keeps_salted = True, False
        await self.run(admit)

    def stop(self) -> None:
        with self.wake:
            self.stopping = True
            self.wake.notify()
        self.thread.join(timeout=5)

    def _post(self, job: Callable[[], T]) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.loop.create_future()
        with self.wake:
            if self.error is not None:
                raise _death(self.error) from self.error
            self.jobs.append((job, future))
            self.wake.notify()
        return future

    def _deliver(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            future = self.results.get(sequence)
            if future is not None and not future.done():
                future.set_result(sequence)

    # --- on the engine's thread ---------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loaded = self.load()
            self.loop.call_soon_threadsafe(self.settled.set)
            engine = self.engine
            while not self.stopping:
                self.beat()
                self._carry_out_jobs()
                if self.frozen or not (engine.busy and engine.awake and engine.has_weights):
                    with self.wake:
                        if not self.jobs and not self.stopping:
                            self.wake.wait(IDLE_WAIT_S)
                    continue
                finished = engine.step()
                if finished:
                    self.loop.call_soon_threadsafe(self._deliver, finished)
                time.sleep(0)  # let the event loop have the interpreter
        except BaseException as error:
            with self.wake:
                self.error = error
            self.loop.call_soon_threadsafe(self._fail_all)

    def _abort(self, sequences: list[Sequence]) -> None:
        self.loop.call_soon_threadsafe(self._deliver, self.engine.abort(sequences))

    def _carry_out_jobs(self) -> None:
        with self.wake:
            jobs, self.jobs = self.jobs, []
        for job, future in jobs:
            try:
                result, error = job(), None
            except Exception as caught:  # the caller's to handle: a bad request, weights that do not fit
                result, error = None, caught
            self.loop.call_soon_threadsafe(_settle, future, result, error)

    def _fail_all(self) -> None:
        self.settled.set()
        assert self.error is not None
        for future in [*(future for _, future in self.jobs), *self.results.values()]:
            _settle(future, None, _death(self.error))


def _death(error: BaseException) -> EngineDied:
    return EngineDied(f"the engine died: {type(error).__name__}: {error}")


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
