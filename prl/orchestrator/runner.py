"""Runs single rollouts and whole groups against environments and engines."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from prl.config.schema import RunConfig, SamplingConfig
from prl.envs.protocol import Message, Reply, Tool
from prl.models.chat import ChatRenderer
from prl.orchestrator.concurrency import UNLIMITED, Limiter, start_limit
from prl.orchestrator.conversation import Conversation
from prl.orchestrator.engine_answers import EngineError
from prl.orchestrator.engines import EnginePool
from prl.orchestrator.env_client import EnvClient, RolloutFailed
from prl.orchestrator.lockstep import Lockstep
from prl.orchestrator.rollout import Generation, Group, Rollout
from prl.orchestrator.tasks import TaskChoice, request_seed

MAX_FAILURES_IN_A_ROW = 200
NO_VERSION = -(10**9)  # before the trainer's first weights: too old for any step, so nothing starts


class NothingWorks(RuntimeError):
    """Every rollout of a long row failed: this is no single bad rollout any more."""


class BusyClock:
    """Seconds in which at least one rollout was in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.total_s = 0.0
        self.since = 0.0

    def enter(self) -> None:
        if self.in_flight == 0:
            self.since = time.perf_counter()
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.total_s += time.perf_counter() - self.since

    def seconds(self) -> float:
        return self.total_s + (time.perf_counter() - self.since if self.in_flight else 0.0)


@dataclass
class RunnerStats:
    failures: Counter[str] = field(default_factory=Counter)  # message -> times
    failed_in_a_row: int = 0
    cancelled: int = 0  # rollouts that took longer than they may
    clock: BusyClock = field(default_factory=BusyClock)
    last_error: str = ""


class RolloutRunner:
    """Bounded concurrency over all rollouts, training and evaluation together."""

    def __init__(
        self,
        config: RunConfig,
        engines: EnginePool,
        envs: dict[str, EnvClient],
        renderer: ChatRenderer,
        lockstep: Lockstep | None,
    ) -> None:
        self.config, self.engines, self.envs, self.renderer, self.lockstep = config, engines, envs, renderer, lockstep
        # a barrier over all live rollouts cannot also limit how many of them are alive
        limit = UNLIMITED if lockstep else start_limit(config.inference, len(engines.decoding))
        self.slots = Limiter(limit)
        self.stats = RunnerStats()
        self.version = NO_VERSION  # policy version that the engines serve

    def start_group(self, index: int, choice: TaskChoice, size: int) -> asyncio.Task[Group]:
        """Begin all rollouts of one task. The task never raises for what an environment or engine does wrong."""
        names = [f"train-{index:09d}-{i:04d}" for i in range(size)]
        jobs = [self.start_rollout(choice, "train", name, self.config.inference.sampling) for name in names]

        async def finish() -> Group:
            try:
                return Group(index, choice.env, size, list(await asyncio.gather(*jobs)))
            finally:
                for job in jobs:
                    job.cancel()

        return asyncio.create_task(finish())

    def start_rollout(
        self, choice: TaskChoice, split: str, name: str, sampling: SamplingConfig
    ) -> asyncio.Task[Rollout | None]:
        """Begin one rollout; its result is None if it failed (counted in `stats`). `name` orders it and seeds its
        sampling.
        """
        job = asyncio.create_task(self._run(choice, split, name, sampling))
        lockstep = self.lockstep
        if lockstep:
            lockstep.enter()  # before anything runs, so that the barrier knows everybody who is to come
            job.add_done_callback(lambda _: lockstep.leave())  # even if it is cancelled before it runs
        return job

    async def _run(self, choice: TaskChoice, split: str, name: str, sampling: SamplingConfig) -> Rollout | None:
        try:
            async with self.slots:
                self.stats.clock.enter()
                try:
                    rollout = await asyncio.wait_for(
                        self._converse(choice, split, name, sampling), self.config.env.rollout_timeout_s
                    )
                finally:
                    self.stats.clock.leave()
            self.stats.failed_in_a_row = 0
            return rollout
        except (RolloutFailed, EngineError, TimeoutError) as error:
            self._count_failure(error)
            return None

    def _count_failure(self, error: Exception) -> None:
        self.stats.cancelled += isinstance(error, TimeoutError)
        text = str(error) or f"no end after {self.config.env.rollout_timeout_s} s"
        self.stats.failures[text] += 1
        self.stats.last_error = text
        # else they fail because the engines are being started again, or wait for weights
        if self.engines.any_serving.is_set() and not self.engines.starved:
            self.stats.failed_in_a_row += 1
        if self.stats.failed_in_a_row >= MAX_FAILURES_IN_A_ROW:
            raise NothingWorks(f"{MAX_FAILURES_IN_A_ROW} rollouts in a row failed; the last one: {text}")

    async def _converse(self, choice: TaskChoice, split: str, name: str, sampling: SamplingConfig) -> Rollout:
        async def generate(prompt_ids: list[int], max_tokens: int) -> Generation:
            request_id = f"{name}-{conversation.turns:03d}"
            seed = request_seed(self.config.seed, request_id)
            salt = f"{split}-{self.version}"

            def send(replica: int | None) -> Coroutine[Any, Any, Generation]:
                return self.engines.generate(prompt_ids, max_tokens, seed, salt, sampling, request_id, replica)

            reply = await (self.lockstep.request(request_id, send) if self.lockstep else send(None))
            if reply.finish_reason == "abort":  # half a reply is nothing to score or to learn from
                raise EngineError(f"an engine aborted a request after {len(reply.token_ids)} tokens")
            return reply

        async def answer(messages: list[Message], keep: int, tools: list[Tool]) -> Reply | None:
            return await conversation.reply(messages, keep, tools)

        conversation = Conversation(self.renderer, self.config.inference, self.config.env.max_turns, generate)
        task, score = await self.envs[choice.env].run(split, choice.index, answer)
        samples = conversation.finished_samples()
        if not samples:
            raise RolloutFailed("the environment scored a conversation without a single reply")
        return Rollout(
            env=choice.env,
            task=task,
            reward=score.reward,
            samples=samples,
            prompt_tokens=conversation.prompt_tokens,
            completion_tokens=conversation.completion_tokens,
            truncated=conversation.truncated,
            turns=conversation.turns,
            messages=conversation.messages,
            metrics=score.metrics,
        )
