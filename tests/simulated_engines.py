"""Engines with a KV ceiling in simulated time: continuous batching, admission by prompt, preemption."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from prl.config.schema import ConcurrencyConfig, InferenceConfig
from prl.orchestrator.engines.concurrency import Controller, Demand, EngineLoad

STEP_S, REQUEST_S, PREFILL_S = 0.02, 0.0002, 0.00002  # of a decode step: fixed, for each request, for a prefilled token


@dataclass
class Rollout:
    prompt: int
    length: int
    done: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.done


@dataclass
class Engine:
    capacity: int  # KV tokens
    seats: int
    running: list[Rollout] = field(default_factory=list)  # oldest first
    waiting: deque[Rollout] = field(default_factory=deque)
    preemptions: int = 0
    now: float = 0.0

    @property
    def held(self) -> int:
        return sum(r.tokens for r in self.running)

    def step(self) -> list[Rollout]:
        """One decode step; returns the rollouts that end."""
        held, prefilled = self.held, 0
        while self.waiting and len(self.running) < self.seats and held + self.waiting[0].tokens <= self.capacity:
            rollout = self.waiting.popleft()
            self.running.append(rollout)
            held, prefilled = held + rollout.tokens, prefilled + rollout.tokens
        while held + len(self.running) > self.capacity and len(self.running) > 1:  # the youngest goes
            rollout = self.running.pop()
            self.waiting.appendleft(rollout)
            self.preemptions += 1
            held -= rollout.tokens
        for rollout in self.running:
            rollout.done += 1
        self.now += STEP_S + REQUEST_S * len(self.running) + PREFILL_S * prefilled
        ended = [r for r in self.running if r.done >= r.length]
        self.running = [r for r in self.running if r.done < r.length]
        return ended


@dataclass
class Outcome:
    tokens_per_s: float  # second half
    limits: list[int]  # at each look
    preemptions: int  # second half


def simulate(config: InferenceConfig, engines: list[Engine], seconds: float, mean_length: int, seed: int) -> Outcome:
    """As many rollouts as the limit allows, for ever; each goes to the engine with the fewest."""
    rng = random.Random(seed)
    adaptive = config.concurrency.mode == "adaptive"
    controller = Controller(config, len(engines))
    limits, ended, tokens, before = [controller.limit], 0, 0, [0] * len(engines)
    look_at, half, preempted = config.concurrency.interval_s, seconds / 2, 0
    peak = 0
    while min(e.now for e in engines) < seconds:
        engine = min(engines, key=lambda e: e.now)
        while sum(len(e.running) + len(e.waiting) for e in engines) < controller.limit:
            least = min(engines, key=lambda e: len(e.running) + len(e.waiting))
            least.waiting.append(Rollout(20, max(1, min(int(rng.expovariate(1 / mean_length)), 4 * mean_length))))
        peak = max(peak, sum(len(e.running) + len(e.waiting) for e in engines))
        finished = engine.step()
        ended += len(finished)
        if engine.now > half:
            tokens += sum(r.length for r in finished)
        if adaptive and engine.now >= look_at:
            look_at += config.concurrency.interval_s
            loads = {
                (i, "0"): EngineLoad(len(e.running), len(e.waiting), e.held / e.capacity, e.preemptions - before[i])
                for i, e in enumerate(engines)
            }
            if engine.now > half:
                preempted += sum(load.preemptions for load in loads.values())
            before = [e.preemptions for e in engines]
            in_flight = sum(len(e.running) + len(e.waiting) for e in engines)
            limits.append(controller.decide(loads, Demand(in_flight, peak, 1, ended)))
            ended, peak = 0, in_flight
    return Outcome(tokens / (seconds - half), limits, preempted)


def fixed(limit: int, seats: int) -> InferenceConfig:
    return InferenceConfig(max_concurrent_rollouts=limit, max_num_seqs=seats)


def adaptive(start: int, seats: int, maximum: int = 4096, **keys: float) -> InferenceConfig:
    return InferenceConfig(
        max_concurrent_rollouts=maximum,
        max_num_seqs=seats,
        concurrency=ConcurrencyConfig(mode="adaptive", start=start, **keys),
    )
