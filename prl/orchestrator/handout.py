"""Batches handed out to the trainer's ranks: what is ready, who may fetch what, and when a batch is dropped."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from prl.orchestrator.batching import EncodedStep
from prl.orchestrator.server import BadRequest
from prl.transport.batch import TrainBatch
from prl.transport.frames import Message

LOOK_S = 0.2
Order = Literal["again", "stop", "batch"]


class Again(Protocol):
    """Who knows whether the trainer is to publish once more the version that it has."""

    def asked_again(self, publications: int) -> bool: ...
    def ask_again(self, publications: int, instead_of_batch: bool) -> bool: ...


@dataclass
class _Batch:
    encoded: EncodedStep
    ready_s: float  # when
    taken: tuple[float, float] | None = None  # when rank 0 fetched it, and generation seconds until then


class Handout:
    """The batches of a run, each with its step.

    A batch is
        ready    from `add` on: encoded, in memory, and any rank that asks for its step gets its part of it;
        taken    once a rank has got it: all others will, too, even if the run is to stop (`stop`);
        trained  once its version is published (`trained`), which tells how long the trainer had it; it still is there
                 for ranks that lag behind, and for a client that asks twice;
        dropped  by the `add` of step + ahead + 2, which can only be made of the versions after its own: `ahead` + 2
                 batches are in memory at most.

    A rank that asks gets a batch, or one of two orders, which all ranks get at the same point: to stop, from the first
    step on that nobody has taken when the run is to end; to publish its version again.
    """

    def __init__(self, resume_step: int, ahead: int, again: Again, generated_s: Callable[[], float]) -> None:
        """`ahead`: by how many versions a batch may be younger than its tokens. `generated_s`: seconds of generation
        so far.
        """
        self.ahead, self.again, self.generated_s = ahead, again, generated_s
        self.changed = asyncio.Condition()
        self.batches: dict[int, _Batch] = {}
        self.last_taken = resume_step  # newest step that any rank has got
        self.stop_at: int | None = None  # first step that nobody will train

    async def add(self, step: int, encoded: EncodedStep) -> list[EncodedStep]:
        """A batch is ready. Returns those that are dropped."""
        async with self.changed:
            self.batches[step] = _Batch(encoded, time.perf_counter())
            outdated = [old for old in self.batches if old < step - self.ahead - 1]
            dropped = [self.batches.pop(old).encoded for old in outdated]
            self.changed.notify_all()
        return dropped

    async def stop(self) -> int:
        """Nobody trains a step that nobody has taken yet. Returns the first such step."""
        async with self.changed:
            self.stop_at = self.last_taken + 1  # ranks that lag behind still get what another one already has
            self.changed.notify_all()
        return self.stop_at

    @property
    def is_stopping(self) -> bool:
        return self.stop_at is not None

    async def take(self, step: int, data_rank: int, publications: int, timeout_s: float) -> Message | None:
        """The batch of a step for one data rank, or an order as a batch without rows, behind as many `publications`.
        None when there is nothing to do within timeout_s. Raises BadRequest for a rank that does not exist.
        """
        deadline = time.monotonic() + timeout_s
        async with self.changed:
            while (order := self._order(step, publications)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), min(left, LOOK_S))  # engines come back unannounced
            if order == "batch":
                return self._part(step, data_rank)
        meta = {"stop": order == "stop", "publish_again": order == "again", "checkpoint": False}
        return TrainBatch(step, [], 0, 0, meta).to_message()

    def _order(self, step: int, publications: int) -> Order | None:
        """What a rank is to do that waits for the batch of `step`; None: to wait."""
        if self.again.asked_again(publications):
            return "again"
        if self.stop_at is not None and step >= self.stop_at:
            return "stop"
        is_ready = step in self.batches
        if step > self.last_taken and self.again.ask_again(publications, instead_of_batch=is_ready):
            return "again"
        return "batch" if is_ready else None

    def _part(self, step: int, data_rank: int) -> Message:
        batch = self.batches[step]
        messages = batch.encoded.messages
        if data_rank >= len(messages):
            raise BadRequest(f"there are {len(messages)} data ranks, so none is {data_rank}")
        self.last_taken = max(self.last_taken, step)
        if data_rank == 0:
            batch.taken = time.perf_counter(), self.generated_s()
        return messages[data_rank]

    def trained(self, step: int) -> dict[str, float] | None:
        """The version that a batch made is published: how much of the time in which the trainer worked on it engines
        were generating, and who waited for whom. None when that was told already, or nobody took it.
        """
        batch = self.batches.get(step)
        if batch is None or batch.taken is None:
            return None
        (taken_s, generated_s), batch.taken = batch.taken, None
        busy_s = time.perf_counter() - taken_s
        return {
            "overlap": (self.generated_s() - generated_s) / busy_s,
            "trainer_busy_s": busy_s,
            "wait_for_trainer_s": taken_s - batch.ready_s,
        }
