"""The engines as the router sees them: what each has in flight, and whether it answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import aiohttp

from prl.config.engines import EngineKind

log = logging.getLogger("prl.router")

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 5.0
PATIENCE = 3  # unanswered checks in a row after which a replica is dead


@dataclass(eq=False)
class Replica:
    """One engine."""

    name: str
    url: str
    kind: EngineKind = "both"
    healthy: bool = False
    silent: int = 0  # checks in a row without an answer
    waiting: set[asyncio.Future[aiohttp.ClientResponse]] = field(default_factory=set)  # for the first byte of an answer
    in_flight: int = 0
    requests: int = 0  # so far
    failures: int = 0  # of these, how many it did not answer or had no weights for

    def drop(self) -> None:
        """What it was asked is asked of another: it is dead, or a successor that knows of nothing and still loads.

        The port of a dead engine is kept for its successor and takes connections meanwhile.
        """
        for call in list(self.waiting):
            call.cancel()


class HealthChecks:
    """Asks every replica once a second. One that has failed gets nothing new until it passes."""

    def __init__(self, session: aiohttp.ClientSession, replicas: list[Replica], forget: Callable[[int], None]) -> None:
        self.session, self.replicas, self.forget = session, replicas, forget

    async def run(self) -> None:
        """For ever."""
        await asyncio.gather(*(self._follow(index) for index in range(len(self.replicas))))

    async def _follow(self, index: int) -> None:
        replica = self.replicas[index]
        while True:
            status = await self._ask(replica)
            replica.silent = replica.silent + 1 if status is None else 0
            if status == 200:
                if not replica.healthy:
                    log.info("%s at %s answers", replica.name, replica.url)
                replica.healthy = True
            elif status is not None or replica.silent >= PATIENCE:  # a busy engine may be slow to answer
                self.fail(index, f"/health: {status or 'no answer'}")
                replica.drop()
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _ask(self, replica: Replica) -> int | None:
        """The status of /health; 0 when nobody listens or it hangs up, None when it does not answer."""
        try:
            timeout = aiohttp.ClientTimeout(total=CHECK_TIMEOUT_S)
            async with self.session.get(f"{replica.url}/health", timeout=timeout) as response:
                return response.status
        except TimeoutError:
            return None
        except aiohttp.ClientError:
            return 0

    def fail(self, index: int, why: str) -> None:
        """Send it nothing more until a check passes; what it had cached is gone, or not to be relied on."""
        replica = self.replicas[index]
        if replica.healthy:
            log.warning("%s at %s is left out: %s", replica.name, replica.url, why)
            replica.healthy = False
            self.forget(index)
