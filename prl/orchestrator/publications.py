"""Publications on their way: from the trainer's offer to engines that serve its weights."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any, Protocol

from prl.transport.kinds import NO_PUBLICATION

LOOK_S = 0.2


class Course(Protocol):
    """What a publication asks of the run that it passes through."""

    def wants_weights(self, instead_of_batch: bool) -> bool:
        """Whether engines wait for weights; `instead_of_batch`: and nothing can be generated before."""

    def may_overtake(self) -> bool:
        """Whether what has the engines can end only with the weights that come next."""

    async def swap(self, version: int, update_info: dict[str, Any], is_first: bool) -> bool:
        """Engines are told to serve it. Returns whether they do."""

    async def evaluate_if_due(self, version: int) -> None:
        """Engines serve it, and nobody else has them."""

    async def begin(self, version: int) -> None:
        """Rollouts of this version may begin."""

    def over(self, version: int) -> None:
        """Nothing more is done about it, for whatever reason."""

    def fail(self, error: Exception) -> None:
        """The run ends by it."""


class Publications:
    """All publications of a run, counted by the trainer from 1.

    A publication is
        offered    by `offer`, once, however often the trainer says so. Until engines are up (`engines_are_up`), and
                   until nobody else has them (an evaluation, the one before), it waits;
        told       when it is its turn, or before, where it `may_overtake`: engines are asked to swap their weights,
                   and have a limited time for it;
        delivered  when engines are done with it, whether they took it (they serve its version) or not (all were gone,
                   or one died in it, and they wait for the next). Its version counts as served in both cases;
        over       when the evaluation that is due has ended and rollouts of its version begin, unless a newer one was
                   delivered meanwhile; then whoever is next has the engines.

    Behind a publication, trainers that hold no weights may be asked to publish the same version again, for engines
    that came back without. All their ranks are told so at the same point, so what was said once is said to all.
    """

    def __init__(self, engines: asyncio.Lock, course: Course) -> None:
        """`engines`: who holds it has them to himself."""
        self.engines, self.course = engines, course
        self.changed = asyncio.Condition()
        self.served = -1  # newest version that was delivered; -1: none
        self.last_offered = self.last_told = NO_PUBLICATION
        self.last_delivered = NO_PUBLICATION - 1, False  # and whether they took it; NO_PUBLICATION: engines are up
        self.again: set[int] = set()  # those behind which the trainer publishes again
        self.under_way: set[asyncio.Task[None]] = set()

    # --- events -------------------------------------------------------------------------------------------------------

    async def engines_are_up(self) -> None:
        await self._note_delivered(NO_PUBLICATION, False, self.served)

    def offer(self, publication: int, version: int, update_info: dict[str, Any]) -> bool:
        """The trainer has weights: bring engines to them in the background. Returns whether this is news."""
        if publication <= self.last_offered:
            return False
        self.last_offered = publication
        task = asyncio.create_task(self._bring(publication, version, update_info))
        self.under_way.add(task)
        task.add_done_callback(self._ended)
        return True

    def _ended(self, task: asyncio.Task[None]) -> None:
        self.under_way.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self.course.fail(error)

    async def _bring(self, publication: int, version: int, update_info: dict[str, Any]) -> None:
        await self._until(lambda: self.is_up)  # the trainer may be up first
        turn = asyncio.create_task(self.engines.acquire())
        try:
            while not turn.done() and not self.course.may_overtake():
                await asyncio.wait([turn], timeout=LOOK_S)
            await self._note_told(publication)
            is_new = version != self.served
            taken = await self.course.swap(version, update_info, is_first=self.served < 0)
            await self._note_delivered(publication, taken, version)
            await turn
            if is_new:  # even if it was overtaken, while engines were started again
                await self.course.evaluate_if_due(version)
            if is_new and version == self.served:
                await self.course.begin(version)
        finally:
            self.course.over(version)
            turn.cancel()
            if turn.done() and not turn.cancelled():
                self.engines.release()

    async def _note_told(self, publication: int) -> None:
        async with self.changed:
            self.last_told = publication
            self.changed.notify_all()

    async def _note_delivered(self, publication: int, taken: bool, version: int) -> None:
        async with self.changed:
            self.served, self.last_delivered = version, (publication, taken)
            self.changed.notify_all()

    def give_up(self) -> None:
        """Of what is under way nothing will come."""
        for task in self.under_way:
            task.cancel()

    async def finish(self) -> None:
        """Wait until nothing is under way."""
        if self.under_way:
            await asyncio.wait(self.under_way)  # `_ended` sees what went wrong

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def is_up(self) -> bool:
        return self.last_delivered[0] >= NO_PUBLICATION

    async def delivered(self, publication: int, timeout_s: float) -> bool | None:
        """Wait until engines are done with it: whether they serve it. None when it takes longer than timeout_s."""
        is_done = await self._until(lambda: self.last_delivered[0] >= publication, timeout_s)
        return self.last_delivered[1] if is_done else None

    async def told(self, publication: int, timeout_s: float) -> bool:
        """Wait until engines are told of it: behind an evaluation. False when it takes longer than timeout_s."""
        return await self._until(lambda: self.last_told >= publication, timeout_s)

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        async with self.changed:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait_for(condition), timeout_s)
            return condition()

    def asked_again(self, publications: int) -> bool:
        """Whether ranks that have published so much were told to publish again."""
        return publications in self.again

    def ask_again(self, publications: int, instead_of_batch: bool) -> bool:
        """Whether they are told so from now on: where engines wait for weights and none are on their way.

        With a batch at hand only if nothing is generated meanwhile, for the next version follows.
        """
        if self.last_delivered[0] != publications or not self.course.wants_weights(instead_of_batch):
            return False
        self.again.add(publications)
        return True
