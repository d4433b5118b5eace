"""Looks at the engines' Prometheus metrics every so often, moves the limit of rollouts, and reports both."""

from __future__ import annotations

import asyncio
import re
from typing import Any

from prl.config.schema import InferenceConfig
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.concurrency import Controller, Engine, EngineLoad, Limiter
from prl.orchestrator.engines.pool import EnginePool

# vLLM's names since 0.10; with data parallelism there is a line for each `engine`
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
LINE = re.compile(rf'^vllm:({"|".join(GAUGES)})\{{.*?\bengine="([^"]*)".*\}} (\S+)', re.MULTILINE)


def parse_loads(text: str) -> dict[str, EngineLoad]:
    """Engine label -> its load, `preemptions` being all since it started. Raises ValueError when a name is missing."""
    found: dict[str, dict[str, float]] = {}
    for name, engine, value in LINE.findall(text):
        found.setdefault(engine, {})[name] = float(value)
    if not found or any(len(values) < len(GAUGES) for values in found.values()):
        raise ValueError(f"no {', '.join(GAUGES)} of every engine in its metrics")
    return {
        engine: EngineLoad(int(values[GAUGES[0]]), int(values[GAUGES[1]]), values[GAUGES[2]], int(values[GAUGES[3]]))
        for engine, values in found.items()
    }


class EngineWatch:
    """Moves the limit if that is adaptive; looks, in any case."""

    def __init__(self, pool: EnginePool, limiter: Limiter, config: InferenceConfig) -> None:
        self.pool, self.limiter = pool, limiter
        self.interval_s = config.concurrency.interval_s
        self.controller = Controller(config, len(pool.decoding)) if config.concurrency.mode == "adaptive" else None
        self.preempted: dict[Engine, int] = {}  # its counter at the last look
        self.sleeps = 0
        self.looks: list[dict[Engine, EngineLoad]] = []  # since the last row
        self.missed = 0

    async def follow(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(self.interval_s)
            await self.look()

    async def look(self) -> None:
        """Read every engine that serves, then decide. Without an answer from each of them nothing changes.

        Engines that are being updated or asleep stand still: what they say then is no sign of load.
        """
        pool = self.pool
        if pool.standing_still:
            return
        serving = [index for index, is_serving in enumerate(pool.serving) if is_serving]
        updates = pool.interruptions
        try:
            texts = await asyncio.gather(*(pool.scrape(index) for index in serving))
            loads = {(i, name): load for i, text in zip(serving, texts, strict=True)
                     for name, load in parse_loads(text).items()}  # fmt: skip
        except (EngineError, ValueError):
            self.missed += 1
            return
        if not loads or pool.interruptions != updates:
            return
        self._decide(self._since_last(loads))

    def _since_last(self, loads: dict[Engine, EngineLoad]) -> dict[Engine, EngineLoad]:
        """The same with the preemptions since the last look; those of a sleep are no sign of load."""
        fresh = {}
        for key, load in loads.items():
            known = self.preempted.get(key, load.preemptions)
            if self.pool.sleeps != self.sleeps:
                known = load.preemptions
            # a counter that fell is that of an engine that was started again
            rise = load.preemptions - known if load.preemptions >= known else load.preemptions
            self.preempted[key] = load.preemptions
            fresh[key] = EngineLoad(load.running, load.waiting, load.kv_usage, rise)
        self.sleeps = self.pool.sleeps
        return fresh

    def _decide(self, loads: dict[Engine, EngineLoad]) -> None:
        self.looks.append(loads)
        demand = self.limiter.demand()
        if self.controller is not None:
            self.limiter.resize(self.controller.decide(loads, demand))

    def row(self) -> dict[str, Any]:
        """Metrics of the looks since the last row; a step shorter than the interval may have had none."""
        looks, self.looks = [look.values() for look in self.looks], []
        row: dict[str, Any] = {"concurrency_limit": self.limiter.limit, "missed_looks": self.missed}
        if looks:
            row |= {
                "kv_cache_usage": max(load.kv_usage for look in looks for load in look),
                "requests_running": sum(load.running for look in looks for load in look) / len(looks),
                "requests_waiting": sum(load.waiting for look in looks for load in look) / len(looks),
            }
        row["preemptions"] = sum(load.preemptions for look in looks for load in look)
        return row
