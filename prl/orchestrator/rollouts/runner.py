"""Runs single rollouts and whole groups against environments and engines."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from prl.config.schema import RunConfig, SamplingConfig
from prl.envs.protocol import Message, Outcome
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.concurrency import UNLIMITED, Limiter, start_limit
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.engines.lockstep import Lockstep
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.rollouts.conversation import Conversation, Generate
from prl.orchestrator.rollouts.env_client import EnvClient
from prl.orchestrator.rollouts.failure_log import FILE_NAME, FailureLog
from prl.orchestrator.rollouts.rollout import EnvironmentGone, FailedRollout, Group, Rollout, RolloutFailed, Sample
from prl.orchestrator.rollouts.tasks import TaskChoice, request_seed
from prl.planning.vllm_arguments import kept_parameters

MAX_FAILURES_IN_A_ROW = 200
MAX_SPANS = 50  # of a step
MAX_TRIES = 2  # of a rollout whose environment's process goes away: one that kills it does so again
DEATH_S = 10.0  # a dead engine refuses all at once, and takes so long at most to end its process, which says why
NO_VERSION = -(10**9)  # before the trainer's first weights: too old for any step, so nothing starts


class NothingWorks(RuntimeError):
    """Every rollout of a long row failed: this is no single bad rollout any more."""


class EnvironmentBroken(NothingWorks):
    """And it was the environment that failed most of them. Its class of failure is `env`."""


class BusyClock:
    """Seconds in which at least one rollout was in flight."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.total_s = 0.0
        self.since = 0.0
        self.spans: list[tuple[float, float]] = []  # of it, not told yet
        self.told = 0.0  # until when they were

    def enter(self) -> None:
        if self.in_flight == 0:
            self.since = time.perf_counter()
        self.in_flight += 1

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            now = time.perf_counter()
            self.total_s += now - self.since
            self.spans = [*self.spans[1 - MAX_SPANS :], (max(self.since, self.told), now)]

    def seconds(self) -> float:
        return self.total_s + (time.perf_counter() - self.since if self.in_flight else 0.0)

    def new_spans(self) -> list[list[float]]:
        """[begin, end] in unix seconds of each stretch of it since the last call, for the timeline of a step."""
        now = time.perf_counter()
        spans = [*self.spans, *([(max(self.since, self.told), now)] if self.in_flight else [])]
        self.spans, self.told, offset = [], now, time.time() - now
        return [[round(begin + offset, 4), round(end + offset, 4)] for begin, end in spans]


@dataclass
class RunnerStats:
    failures: int = 0
    # env -> outcomes of those that failed since one of its rollouts finished
    failed_in_a_row: dict[str, Counter[Outcome]] = field(default_factory=dict)
    slow_in_a_row: Counter[str] = field(default_factory=Counter)  # of them, those late that waited for an engine
    cancelled: int = 0  # rollouts that took longer than they may
    retried: int = 0  # rollouts begun again, since their environment's process went away
    clock: BusyClock = field(default_factory=BusyClock)
    last_error: str = ""


@dataclass
class _Begun:
    """A rollout under way, and what there is of it if it never ends."""

    choice: TaskChoice
    split: str
    name: str
    group: int | None
    version: int  # of the policy that the engines served when it began
    replies: list[tuple[list[int], Generation]] = field(default_factory=list)  # (prompt, what came), of its turns
    conversation: Conversation = field(init=False)
    task: str = ""
    is_late: bool = False
    waits_for_engine: bool = False

    @property
    def samples(self) -> list[Sample]:
        return self.conversation.finished_samples()

    @property
    def messages(self) -> list[Message]:
        return self.conversation.messages if hasattr(self, "conversation") else []

    def rollout(self, reward: float, metrics: dict[str, float] | None = None) -> Rollout:
        """What was said so far, with a reward."""
        conversation = self.conversation
        return Rollout(
            env=self.choice.env,
            task=self.task or f"{self.split}/{self.choice.index}",
            reward=reward,
            samples=self.samples,
            prompt_tokens=conversation.prompt_tokens,
            completion_tokens=conversation.completion_tokens,
            asked_tokens=conversation.asked_tokens,
            cached_tokens=conversation.cached_tokens,
            truncated=conversation.truncated,
            turns=conversation.turns,
            messages=conversation.messages,
            metrics=metrics or {},
            outcome="timeout" if self.is_late else "policy",
        )


class RolloutRunner:
    """Bounded concurrency over all rollouts, training and evaluation together."""

    def __init__(
        self,
        config: RunConfig,
        engines: EnginePool,
        envs: dict[str, EnvClient],
        renderer: ChatRenderer,
        lockstep: Lockstep | None,
        failure_log: FailureLog | None = None,
    ) -> None:
        self.config, self.engines, self.envs, self.renderer, self.lockstep = config, engines, envs, renderer, lockstep
        # a barrier over all live rollouts cannot also limit how many of them are alive
        limit = UNLIMITED if lockstep else start_limit(config.inference, len(engines.decoding))
        self.slots = Limiter(limit)
        self.failure_log = failure_log
        self.stats = RunnerStats()
        self.version = NO_VERSION  # policy version that the engines serve

    def start_group(self, index: int, choice: TaskChoice, size: int) -> asyncio.Task[Group]:
        """Begin all rollouts of one task. The task never raises for what an environment or engine does wrong."""
        names = [f"train-{index:09d}-{i:04d}" for i in range(size)]
        jobs = [self.start_rollout(choice, "train", name, self.config.inference.sampling, index) for name in names]

        async def finish() -> Group:
            try:
                return Group(index, choice.env, size, list(await asyncio.gather(*jobs)))
            finally:
                for job in jobs:
                    job.cancel()

        return asyncio.create_task(finish())

    def start_rollout(
        self, choice: TaskChoice, split: str, name: str, sampling: SamplingConfig, group: int | None = None
    ) -> asyncio.Task[Rollout | FailedRollout]:
        """Begin one rollout; those that fail are counted in `stats` and kept for reading. `name` orders it and seeds
        its sampling.
        """
        job = asyncio.create_task(self._run(_Begun(choice, split, name, group, self.version), sampling))
        lockstep = self.lockstep
        if lockstep:
            lockstep.enter()  # before anything runs, so that the barrier knows everybody who is to come
            job.add_done_callback(lambda _: lockstep.leave())  # even if it is cancelled before it runs
        return job

    async def _run(self, begun: _Begun, sampling: SamplingConfig) -> Rollout | FailedRollout:
        try:
            async with self.slots:
                begun.version = self.version
                self.stats.clock.enter()
                try:
                    rollout = await self._converse_again(begun, sampling)
                finally:
                    self.stats.clock.leave()
        except RolloutFailed as error:
            failure = error
        except EngineError as error:
            failure = RolloutFailed(str(error), "infrastructure", traceback.format_exc())
        except asyncio.CancelledError:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise
            failure = RolloutFailed("cancelled by nobody of this run", "infrastructure", traceback.format_exc())
        else:
            self.stats.failed_in_a_row.pop(begun.choice.env, None)
            self.stats.slow_in_a_row.pop(begun.choice.env, None)
            return rollout
        try:
            return self._fail(begun, failure)
        except EnvironmentBroken:
            raise
        except NothingWorks:
            deaths = self.engines.restarts
            await asyncio.sleep(DEATH_S)
            if self.engines.any_serving.is_set() and self.engines.restarts == deaths:
                raise
            self.stats.failed_in_a_row.pop(begun.choice.env, None)  # that was one event
            self.stats.slow_in_a_row.pop(begun.choice.env, None)
            return FailedRollout(failure.outcome, str(failure))

    def _fail(self, begun: _Begun, failure: RolloutFailed) -> Rollout | FailedRollout:
        """Count a failure and keep it for reading; what takes the rollout's place. Raises NothingWorks."""
        stats, choice, text, outcome = self.stats, begun.choice, str(failure), failure.outcome
        is_late = outcome == "timeout"
        if is_late and self.config.env.on_timeout == "zero":
            # an evaluation counts it, whatever it said; to learn from there must be something
            instead = begun.rollout(0.0) if begun.samples or begun.split != "train" else None
        else:
            instead = None
        stats.cancelled += begun.is_late
        stats.failures += instead is None
        stats.last_error = text
        if self.failure_log is not None:
            about = {"version": begun.version, "split": begun.split, "group": begun.group, "rollout": begun.name}
            task = {"env": choice.env, "task": choice.index, "outcome": outcome, "error": text, "trace": failure.trace}
            self.failure_log.write(about | task, begun.messages)
        if instead is not None:
            return instead
        # else they fail because the engines are being started again, or wait for weights
        if (self.engines.any_serving.is_set() and not self.engines.starved) or outcome in ("environment", "grader"):
            stats.slow_in_a_row[choice.env] += begun.is_late and begun.waits_for_engine
            self._count_in_a_row(choice.env, outcome, text)
        return FailedRollout(outcome, text)

    def _count_in_a_row(self, env: str, outcome: Outcome, text: str) -> None:
        in_a_row = self.stats.failed_in_a_row.setdefault(env, Counter())
        in_a_row[outcome] += 1
        if in_a_row.total() < MAX_FAILURES_IN_A_ROW:
            return
        kinds = ", ".join(f"{count} {kind}" for kind, count in in_a_row.most_common())
        said = f"{in_a_row.total()} rollouts of env/{env} in a row failed ({kinds}); the last one: {text}."
        if in_a_row["infrastructure"] * 2 > in_a_row.total():
            raise NothingWorks(f"{said} All that is known of them is in {FILE_NAME} and in the engines' logs.")
        if self.stats.slow_in_a_row[env] * 2 > in_a_row.total():
            limit = self.config.inference.max_concurrent_rollouts
            raise NothingWorks(
                f"{said} When most of them ended, an engine was still generating for them: it is too slow for so many. "
                f"Fewer at a time (inference.max_concurrent_rollouts={limit}), shorter ones "
                "(inference.sampling.max_tokens), more time (env.rollout_timeout_s) or more engines; the same command "
                "resumes."
            )
        raise EnvironmentBroken(
            f"{said} {FILE_NAME} in the run's directory has their tracebacks and messages: mend the environment "
            f"(env.mix.{env}.id={self.config.env.mix[env].id}), and the same command resumes."
        )

    async def _converse_again(self, begun: _Begun, sampling: SamplingConfig) -> Rollout:
        """A rollout from prompt to score; from its beginning, with the replies that it has got, if its environment's
        process goes away. So nothing is sampled twice, and a synchronous run does not notice.
        """
        for _ in range(MAX_TRIES - 1):
            try:
                return await self._converse(begun, sampling)
            except EnvironmentGone:
                self.stats.retried += 1
        return await self._converse(begun, sampling)

    async def _converse(self, begun: _Begun, sampling: SamplingConfig) -> Rollout:
        """A rollout from prompt to score. Raises RolloutFailed, EngineError, and what ends the run."""
        choice, timeout_s = begun.choice, self.config.env.rollout_timeout_s
        begun.conversation = Conversation(
            self.renderer, self.config.inference, self.config.env.max_turns, self._generator(begun, sampling)
        )
        env = self.envs[choice.env]
        try:
            async with asyncio.timeout(timeout_s) as limit:
                begun.task, score = await env.run(begun.split, choice.index, begun.conversation.reply)
        except TimeoutError as error:
            if not limit.expired():
                raise RolloutFailed(f"TimeoutError: {error}", "infrastructure", traceback.format_exc()) from error
            begun.is_late = True
            is_up = self.engines.any_serving.is_set() and not self.engines.starved and env.connected.is_set()
            what = (
                f"no end after {timeout_s} s" + ", an engine was generating" * begun.waits_for_engine
                if is_up
                else f"no engine or environment within {timeout_s} s"
            )
            raise RolloutFailed(what, "timeout" if is_up else "infrastructure") from None
        finally:
            begun.conversation.end()
        if not begun.samples:
            what = "the environment scored a conversation without a single reply"
            if begun.conversation.truncated:
                context = self.config.inference.max_model_len
                what += f": its first prompt leaves no room for one (inference.max_model_len={context})"
            raise RolloutFailed(what)
        return begun.rollout(score.reward, score.metrics)

    def _generator(self, begun: _Begun, sampling: SamplingConfig) -> Generate:
        """What a conversation asks for each of its turns."""
        telling = kept_parameters(self.config) if begun.split == "train" else None
        # for all turns: a rollout in flight goes on with the KV that it has, and one that starts later never finds it
        salt = f"{begun.split}-{begun.version}"

        async def generate(prompt_ids: list[int], max_tokens: int, routed: int) -> Generation:
            turn = begun.conversation.turns
            if [prompt for prompt, _ in begun.replies[turn : turn + 1]] == [prompt_ids]:
                return begun.replies[turn][1]
            request_id = f"{begun.name}-{turn:03d}"
            seed = request_seed(self.config.seed, request_id)

            def send(replica: int | None) -> Coroutine[Any, Any, Generation]:
                asked = prompt_ids, max_tokens, seed, salt, sampling, request_id, replica, telling, routed
                return self.engines.generate(*asked)

            begun.waits_for_engine = True
            try:
                reply = await (self.lockstep.request(request_id, send) if self.lockstep else send(None))
            except (LookupError, TypeError, ValueError, AttributeError) as error:  # fields that are not what they are
                raise EngineError(f"an engine's answer cannot be read: {type(error).__name__}: {error}") from error
            begun.waits_for_engine = False
            if reply.finish_reason == "abort":  # half a reply is nothing to score or to learn from
                raise EngineError(f"an engine aborted a request after {len(reply.token_ids)} tokens")
            begun.replies[turn:] = [(prompt_ids, reply)]
            return reply

        return generate
