"""How many rollouts run at once: a limit that can move, and the rule by which it follows the engines' load."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from prl.config.schema import InferenceConfig

CUT = 0.8  # what preemptions leave of the limit; not by their number, for one request may be preempted many times
RAMP, CREEP = 1.0, 0.1  # growth for each rollout that ends: before the engines' ceiling was met, and afterwards
TRANSIT = 0.25  # of the running requests may be on their way without being a queue
UNLIMITED = 1 << 30

Engine = tuple[int, str]  # replica, and the label that its metrics give an engine


@dataclass(frozen=True)
class EngineLoad:
    """What one engine says of itself."""

    running: int  # requests
    waiting: int
    kv_usage: float  # share of the KV cache that requests hold
    preemptions: int  # since the last look


@dataclass(frozen=True)
class Demand:
    """What the limiter says."""

    in_flight: int  # rollouts, now
    peak: int  # and the most since the last look
    wanting: int  # rollouts that wait to be let in
    ended: int  # rollouts, since the last look


class Limiter:
    """Lets so many in at once, first come, first served. Shrinking ends nobody: it lets nobody in until enough left."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_flight = self.peak = 0  # now, and the most since the last `demand`
        self.ended = 0
        self.queue: deque[asyncio.Future[None]] = deque()

    @property
    def wanting(self) -> int:
        """Those that wait to be let in."""
        return sum(not turn.done() for turn in self.queue)

    async def __aenter__(self) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.queue.append(turn)
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._admit()  # of those behind
            else:  # let in and cancelled at the same moment
                self._leave()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended += 1
        self._leave()

    def resize(self, limit: int) -> None:
        self.limit = limit
        self._admit()

    def _leave(self) -> None:
        self.in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self.queue and (self.queue[0].done() or self.in_flight < self.limit):
            turn = self.queue.popleft()
            if not turn.done():  # else cancelled while it waited
                self.in_flight += 1
                self.peak = max(self.peak, self.in_flight)
                turn.set_result(None)

    def demand(self) -> Demand:
        """What happened since this was last asked."""
        told = Demand(self.in_flight, self.peak, self.wanting, self.ended)
        self.peak, self.ended = self.in_flight, 0
        return told


class Controller:
    """Engines' load in, limit out. The engine that is worst off decides, for requests are spread evenly.

    The clock is the rollouts themselves, as acknowledgements are TCP's (Jacobson, "Congestion Avoidance and Control",
    1988): each that ends lets the limit grow, at first by one, so that it doubles with every generation of rollouts,
    and by a tenth once the engines' ceiling was met.
    """

    def __init__(self, config: InferenceConfig, engines: int) -> None:
        self.rule, self.maximum, self.seats = config.concurrency, config.max_concurrent_rollouts, config.max_num_seqs
        self.size = float(start_limit(config, engines))
        self.growth = RAMP
        self.before: dict[Engine, float] = {}  # engine -> waiting requests per running one, at the last look

    @property
    def limit(self) -> int:
        return int(self.size)

    def decide(self, loads: Mapping[Engine, EngineLoad], demand: Demand) -> int:
        """The new limit. `loads`: of every engine that serves."""
        queues = {engine: load.waiting / max(load.running, 1) for engine, load in loads.items()}
        # what stands in two looks is a queue; a burst is not (CoDel, RFC 8289)
        standing = {engine: min(queue, self.before.get(engine, 0.0)) for engine, queue in queues.items()}
        self.before = queues
        usage = max((load.kv_usage for load in loads.values()), default=0.0)
        holds = min((self._holds(load, standing[engine]) for engine, load in loads.items()), default=1.0)
        preempted = any(load.preemptions for load in loads.values())
        if demand.in_flight > self.limit:
            # what was decided has had no effect yet; but what turns out to be far too much need not be waited for
            if demand.in_flight * holds < self.limit * CUT:
                self._shrink(demand.in_flight * holds)
        elif preempted or holds < 1:
            self._shrink(min(self.limit, demand.peak) * min(holds, CUT if preempted else 1.0))
        elif demand.wanting and max(standing.values(), default=0.0) <= TRANSIT:
            self._grow(demand.ended, usage)
        return self.limit

    def _holds(self, load: EngineLoad, queue: float) -> float:
        """The share of its requests with which an engine would be full and no more; 1 when it is not too full."""
        factor = 1.0
        if load.kv_usage > self.rule.kv_high:
            factor = self.rule.kv_high / load.kv_usage
        if load.kv_usage > self.rule.kv_high or load.running >= self.seats:
            factor = min(factor, 1 / (1 + queue))
        return factor

    def _shrink(self, size: float) -> None:
        self.growth = CREEP
        self.size = float(max(self.rule.min, math.floor(size)))

    def _grow(self, ended: int, usage: float) -> None:
        """Not beyond the low mark, were each rollout to take what those that run take now."""
        room = self.size * self.rule.kv_low / usage if usage > 0 else math.inf
        wished = self.size + self.growth * min(ended, self.size)
        self.size = max(self.size, min(wished, room, float(self.maximum)))


def start_limit(config: InferenceConfig, engines: int) -> int:
    """The limit at the start: in mode "fixed" the upper bound, for good."""
    if config.concurrency.mode == "fixed":
        return config.max_concurrent_rollouts
    seats = config.max_num_seqs * config.dp * engines
    return min(config.concurrency.start or max(seats, config.concurrency.min), config.max_concurrent_rollouts)
