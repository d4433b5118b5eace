"""Reproducible generation: requests enter the engines in fixed sets, so batch composition never depends on timing.

Rounding depends on which sequences are computed together. In synchronous runs (max_off_policy_steps=0) all live
rollouts must therefore reach their next request before any is sent; then the engines are paused, given all of them,
and resumed. An engine that admits a paused queue in order of request id (the built-in one does) then computes the
same numbers in every run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.engines.requests import PAUSE

Send = Callable[[int], Coroutine[Any, Any, Generation]]  # takes the replica to use


@dataclass(eq=False)
class _Waiting:
    request_id: str
    send: Send
    result: asyncio.Future[Generation]


class Lockstep:
    """A barrier over live rollouts. Each calls `enter` when it starts, `leave` when it ends, and generates through
    `request`.
    """

    def __init__(self, engines: EnginePool) -> None:
        self.engines = engines
        self.live = 0
        self.waiting: list[_Waiting] = []
        self.flushing: asyncio.Task[None] | None = None

    def enter(self) -> None:
        self.live += 1

    def leave(self) -> None:
        self.live -= 1
        self._flush_if_complete()

    async def request(self, request_id: str, send: Send) -> Generation:
        waiting = _Waiting(request_id, send, asyncio.get_running_loop().create_future())
        self.waiting.append(waiting)
        self._flush_if_complete()
        try:
            return await waiting.result
        finally:
            if waiting in self.waiting:  # cancelled before it was sent: must not be counted as live
                self.waiting.remove(waiting)

    def _flush_if_complete(self) -> None:
        if self.waiting and len(self.waiting) == self.live and self.flushing is None:
            batch, self.waiting = sorted(self.waiting, key=lambda w: w.request_id), []
            self.flushing = asyncio.create_task(self._flush(batch))

    async def _flush(self, batch: list[_Waiting]) -> None:
        try:
            replicas = len(self.engines.urls)
            await self.engines.everywhere(PAUSE)
            sent = [asyncio.create_task(w.send(i % replicas)) for i, w in enumerate(batch)]
            for replica in range(replicas):
                mine = sent[replica::replicas]
                while await self.engines.queued(replica) < sum(not task.done() for task in mine):  # done: refused
                    await asyncio.sleep(0.002)
            await self.engines.everywhere("/resume")
            results = await asyncio.gather(*sent, return_exceptions=True)
        except Exception as error:
            results = [error] * len(batch)
        self.flushing = None
        for waiting, result in zip(batch, results, strict=True):
            if waiting.result.done():  # the rollout was cancelled meanwhile
                continue
            if isinstance(result, BaseException):
                waiting.result.set_exception(result)
            else:
                waiting.result.set_result(result)
        self._flush_if_complete()  # requests that came meanwhile, if nobody of this batch is alive any more
