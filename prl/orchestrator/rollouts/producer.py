"""Keeps rollouts flowing, and hands out one optimizer step's worth of groups at a time.

How far generation may run ahead follows from the staleness bound alone. A group begun now will probably be trained at
step S = next_step + outstanding // groups_per_batch, with policy S - 1 in training, so it may start while S - 1 -
version <= max_off_policy_steps. What nevertheless arrives too old is dropped, counted and replaced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prl.config.schema import RunConfig
from prl.envs.protocol import OUTCOMES, Outcome
from prl.orchestrator.rollouts.advantages import group_advantages, has_signal
from prl.orchestrator.rollouts.rollout import Group, Rollout
from prl.orchestrator.rollouts.runner import RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskSampler
from prl.orchestrator.rollouts.teacher import Teacher

GROUPS_A_TURN = 32  # begin in one turn of the event loop: 60 us each, and requests wait for it


@dataclass
class StepGroups:
    """The groups of one optimizer step, and what was sampled but not trained while they were collected."""

    step: int
    groups: list[Group]
    rewards: list[float] = field(default_factory=list)  # of every finished rollout, trained or filtered
    rewards_by_env: dict[str, list[float]] = field(default_factory=dict)
    metrics: dict[str, list[float]] = field(default_factory=dict)  # "<env>/<metric>" -> what environments measured
    completion_tokens: int = 0  # sampled for this step, dropped ones included
    dropped_stale: int = 0  # groups
    dropped_stale_rollouts: int = 0
    dropped_stale_requests: int = 0
    dropped_stale_tokens: int = 0  # sampled ones
    filtered_groups: int = 0
    scored_groups: int = 0  # trained or filtered
    no_signal_groups: int = 0  # of them, those whose advantages are all zero
    failed_groups: int = 0  # of whose rollouts none finished
    outcomes: dict[str, Counter[Outcome]] = field(default_factory=dict)  # env -> of all rollouts that ended
    truncated: int = 0
    rollouts: int = 0

    @property
    def sampled_rewards(self) -> list[float]:
        """What finished while this step was collected; of what it trains, when all of that was counted before."""
        return self.rewards or [r.reward for group in self.groups for r in group.finished]

    @property
    def truncated_share(self) -> float:
        """Of the same rollouts."""
        if self.rollouts:
            return self.truncated / self.rollouts
        finished = [r.truncated for group in self.groups for r in group.finished]
        return sum(finished) / max(len(finished), 1)

    @property
    def no_signal_share(self) -> float:
        """Of groups that were scored while this step was collected, or of what it trains."""
        if self.scored_groups:
            return self.no_signal_groups / self.scored_groups
        found = [
            has_signal(np.array([r.advantage for r in group.finished]))
            or any(sample.bonus is not None for r in group.finished for sample in r.samples)
            for group in self.groups
        ]
        return 1 - sum(found) / max(len(found), 1)

    def count(self, env: str, finished: list[Rollout]) -> None:
        """Add a group's rollouts, trained or not, to the numbers of this step."""
        rewards = [r.reward for r in finished]
        self.rollouts += len(finished)
        self.rewards += rewards
        self.rewards_by_env.setdefault(env, []).extend(rewards)
        for name, value in ((name, value) for r in finished for name, value in r.metrics.items()):
            self.metrics.setdefault(f"{env}/{name}", []).append(value)
        self.completion_tokens += sum(r.completion_tokens for r in finished)
        self.truncated += sum(r.truncated for r in finished)

    def outcome_counts(self, several: bool) -> dict[str, int]:
        """`outcome/<outcome>`, and of several environments `outcome/<env>/<outcome>`: how rollouts ended."""
        row = {f"outcome/{kind}": sum(counts[kind] for counts in self.outcomes.values()) for kind in OUTCOMES}
        if several:
            row |= {f"outcome/{env}/{kind}": counts[kind] for env, counts in self.outcomes.items() for kind in OUTCOMES}
        return row

    def row(self, several: bool) -> dict[str, float]:
        """What its rollouts came to, what each environment gave and measured, and what the prefix cache had of them."""
        row: dict[str, float] = dict(self.outcome_counts(several))
        row |= {f"reward/{env}": float(np.mean(rewards)) for env, rewards in self.rewards_by_env.items()}
        row |= {f"env/{name}": float(np.mean(values)) for name, values in self.metrics.items()}
        finished = [r for group in self.groups for r in group.finished]
        if asked := sum(r.asked_tokens for r in finished):
            found = sum(r.cached_tokens for r in finished)
            row |= {"prefix_cache_queries": asked, "prefix_cache_hits": found, "prefix_cache_hit_rate": found / asked}
        return row

    def count_stale(self, group: Group) -> None:
        """Add what was sampled for a group that became too old."""
        self.dropped_stale += 1
        self.dropped_stale_rollouts += len(group.finished)
        self.dropped_stale_requests += sum(r.turns for r in group.finished)
        self.dropped_stale_tokens += sum(r.completion_tokens for r in group.finished)


class Producer:
    """Starts groups, collects them, and serves `next_step`."""

    def __init__(
        self,
        config: RunConfig,
        runner: RolloutRunner,
        sampler: TaskSampler,
        taking_turns: bool,
        teacher: Teacher | None = None,
    ) -> None:
        self.config, self.algo, self.runner, self.sampler = config, config.algo, runner, sampler
        self.teacher = teacher
        self.groups_per_batch = self.algo.batch_size // self.algo.group_size
        # with colocated engines, and in synchronous runs, nothing is generated while the trainer trains
        self.run_ahead = 0 if taking_turns else self.algo.max_off_policy_steps
        self.synchronous = self.algo.max_off_policy_steps == 0
        self.next_group = 0
        self.requeued: list[int] = []  # group indices to run again before new ones (after a resume)
        self.in_flight: dict[int, asyncio.Task[None]] = {}
        self.ready: list[Group] = []
        self.going_on: asyncio.Task[None] | None = None  # starts more of them in the next turn
        self.changed = asyncio.Condition()
        self.current = StepGroups(1, [])
        self.error: BaseException | None = None
        self.holding = False  # no new groups while an evaluation has the engines
        self.stopped = False

    def resume(self, step: int, state: dict[str, object]) -> None:
        """Continue behind `step`, with the state that `state()` gave for it."""
        self.current = StepGroups(step + 1, [])
        self.next_group = int(state["next_group"])  # type: ignore[call-overload]
        self.requeued = list(state["outstanding"])  # type: ignore[call-overload]

    def state(self) -> dict[str, object]:
        """What a checkpoint must hold: where to go on, and which groups were sampled but not trained."""
        outstanding = [*self.in_flight, *(g.index for g in self.ready), *self.requeued]
        return {"next_group": self.next_group, "outstanding": sorted(outstanding)}

    # --- starting groups ----------------------------------------------------------------------------------------------

    def start_groups(self) -> None:
        """Start as many groups as may run now, some in each turn of the event loop."""
        if not self.synchronous:
            for _ in range(GROUPS_A_TURN):
                if not self._has_room():
                    return
                self._start_one()
            if self.going_on is None and self._has_room():
                self.going_on = asyncio.create_task(self._go_on())
        elif not self.in_flight and self._lands_in_time(0):
            # waves: replacements start together, when nothing else runs, so that their order does not depend on timing
            for _ in range(self.groups_per_batch - len(self.ready)):
                self._start_one()

    def _has_room(self) -> bool:
        return self._lands_in_time(len(self.in_flight) + len(self.ready))

    async def _go_on(self) -> None:
        self.going_on = None
        try:
            self.start_groups()
        except Exception as error:
            await self._end_with(error)

    def _lands_in_time(self, outstanding: int) -> bool:
        """Whether a group begun behind `outstanding` others would be young enough for the step that it lands in."""
        lands_at = self.current.step + outstanding // self.groups_per_batch
        return (
            not (self.holding or self.stopped)
            and lands_at <= self.config.max_steps
            and lands_at - 1 - self.runner.version <= self.run_ahead
        )

    def _start_one(self) -> None:
        if self.requeued:
            index = self.requeued.pop(0)
        else:
            index, self.next_group = self.next_group, self.next_group + 1
        running = self.runner.start_group(index, self.sampler[index], self.algo.group_size)
        self.in_flight[index] = asyncio.create_task(self._collect(index, running))

    async def _collect(self, index: int, running: asyncio.Task[Group]) -> None:
        """Wait for a group and take it. Whatever goes wrong, `next_step` hears of it: no group is lost in silence."""
        try:
            group = await running
            if self.teacher is not None:
                await self.teacher.score(group)
            async with self.changed:
                del self.in_flight[index]
                self._take(group)
                self.start_groups()
                self.changed.notify_all()
        except BaseException as error:
            running.cancel()
            if isinstance(error, asyncio.CancelledError):
                if (current := asyncio.current_task()) is not None and current.cancelling():
                    raise  # by `stop`
                lost = RuntimeError(f"group {index} was cancelled by nobody of this run")
                lost.__cause__, error = error, lost
            await self._end_with(error)

    async def _end_with(self, error: BaseException) -> None:
        """Have `next_step` raise this; the first one counts."""
        async with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def _take(self, group: Group) -> None:
        """Score a finished group; keep it if there is something to learn from it."""
        finished, current = group.finished, self.current
        current.outcomes.setdefault(group.env, Counter()).update(group.outcomes)
        if not finished:
            current.failed_groups += 1
            return
        current.count(group.env, finished)
        advantages = group_advantages(
            np.array([r.reward for r in finished]),
            np.array([r.completion_tokens for r in finished]),
            np.array([r.truncated for r in finished]),
            self.algo,
            self.config.inference.sampling.max_tokens,
        )
        # what a teacher says of each token is something to learn from, whatever the rewards
        is_signal = self.teacher is not None or has_signal(advantages)
        current.scored_groups += 1
        current.no_signal_groups += not is_signal
        # once so many were replaced, take groups as they come: a policy that solves everything must not sample for ever
        replaceable = current.filtered_groups < self.algo.max_replacement_ratio * self.groups_per_batch
        if self.algo.filter_zero_signal and replaceable and not is_signal:
            current.filtered_groups += 1
            return
        for rollout, advantage in zip(finished, advantages, strict=True):
            rollout.advantage = self.algo.adv_tau * float(advantage) if self.algo.adv_tau else 0.0
        self.ready.append(group)
        if self.synchronous:
            self.ready.sort(key=lambda g: g.index)

    # --- handing out steps --------------------------------------------------------------------------------------------

    async def next_step(self) -> StepGroups:
        """Wait for a full batch whose every token is young enough for its step. Raises what killed the rollouts."""
        async with self.changed:
            while True:
                if self.error is not None:
                    raise self.error
                self._drop_stale()
                self.start_groups()
                if len(self.ready) >= self.groups_per_batch:
                    taken, self.ready = self.ready[: self.groups_per_batch], self.ready[self.groups_per_batch :]
                    finished, self.current = self.current, StepGroups(self.current.step + 1, [])
                    finished.groups = taken
                    self.start_groups()
                    return finished
                await self.changed.wait()

    def _drop_stale(self) -> None:
        bound = self.current.step - 1 - self.algo.max_off_policy_steps  # oldest version that may still be trained
        for group in [g for g in self.ready if g.oldest_version < bound]:
            self.current.count_stale(group)
            self.ready.remove(group)

    async def set_version(self, version: int) -> None:
        async with self.changed:
            self.runner.version = version
            self.start_groups()
            self.changed.notify_all()

    async def hold(self, holding: bool) -> None:
        async with self.changed:
            self.holding = holding
            if not holding:
                self.start_groups()
            self.changed.notify_all()

    async def stop(self) -> None:
        self.stopped = True  # and what goes on starts nothing
        tasks = list(self.in_flight.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
