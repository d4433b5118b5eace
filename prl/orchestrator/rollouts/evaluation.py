"""Held-out evaluation: k samples per task, avg@k and pass@k."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from prl.config.schema import EvalConfig, SamplingConfig
from prl.envs.protocol import OUTCOMES
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.rollouts.rollout import FailedRollout, Rollout
from prl.orchestrator.rollouts.runner import RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskChoice

Ended = dict[tuple[str, int], list[Rollout | FailedRollout]]  # (env, task) -> its samples
MAX_TRIES = 3  # of a sample that falls to the infrastructure


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples passes (arXiv:2107.03374, eq. 1)."""
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def _is_missing(result: Rollout | FailedRollout | None) -> bool:
    """Whether a sample was not drawn yet, or fell to the infrastructure."""
    return result is None or (isinstance(result, FailedRollout) and result.outcome == "infrastructure")


def choose_tasks(count: int, wanted: int) -> list[int]:
    """The same held-out tasks at every evaluation, and for every seed of the run: points of a sweep stay comparable."""
    return sorted(random.Random(0).sample(range(count), min(wanted, count)))


class TaskScore(NamedTuple):
    """What the finished samples of one task came to."""

    task: int
    rewards: list[float]
    lengths: list[int]  # completion tokens
    passes: float  # estimate of pass@k, of at most as many samples as there are

    @property
    def average(self) -> float:
        return float(np.mean(self.rewards))


def task_scores(ended: Ended, env: str, config: EvalConfig) -> list[TaskScore]:
    """Of the tasks of an environment of which any sample has finished, in their order."""
    scores = []
    for (name, index), several in ended.items():
        finished = [result for result in several if isinstance(result, Rollout)]
        if name == env and finished:
            rewards = [result.reward for result in finished]
            passed = sum(reward >= config.pass_threshold for reward in rewards)
            passes = pass_at_k(len(rewards), passed, min(config.k, len(rewards)))
            scores.append(TaskScore(index, rewards, [result.completion_tokens for result in finished], passes))
    return scores


async def evaluate(
    runner: RolloutRunner,
    config: EvalConfig,
    sampling: SamplingConfig,
    counts: dict[str, int],
    version: int,
    look: Callable[[Ended], None] = lambda ended: None,
) -> dict[str, Any]:
    """Metrics of the policy that the engines serve now.

    eval/reward is the mean over all samples of all environments; eval/<env>/avg@k, pass@k; the number of failed
    rollouts, which count as neither, and eval/outcome/*, of all. What fails for want of an engine or an environment's
    process says nothing of the policy, and is done again. Raises what ends a run, and EngineError where nothing else
    came of all; then leaves none running.

    Args:
        look: is shown what came of all samples.
    """
    drawn = config.sampling(sampling)
    samples = [
        (TaskChoice(env, index), f"eval-{version:06d}-{env}-{index:06d}-{i:04d}")
        for env in sorted(counts)
        for index in choose_tasks(counts[env], config.num_tasks)
        for i in range(config.k)
    ]
    results: dict[str, Rollout | FailedRollout] = {}
    for _ in range(MAX_TRIES):
        todo = [(choice, name) for choice, name in samples if _is_missing(results.get(name))]
        jobs = [runner.start_rollout(choice, "held_out", name, drawn) for choice, name in todo]
        try:
            results |= zip((name for _, name in todo), await asyncio.gather(*jobs), strict=True)
        finally:
            for job in jobs:
                job.cancel()
    if results and all(_is_missing(result) for result in results.values()):
        first = next(iter(results.values()))
        raise EngineError(f"the evaluation of version {version} has no rollout: {getattr(first, 'error', first)}")
    ended: Ended = {}
    for choice, name in samples:
        ended.setdefault((choice.env, choice.index), []).append(results[name])
    look(ended)
    row: dict[str, Any] = {}
    everything: list[float] = []
    for env in sorted(counts):
        scores = task_scores(ended, env, config)
        everything += [reward for task in scores for reward in task.rewards]
        if scores:
            row[f"eval/{env}/avg@{config.k}"] = float(np.mean([task.average for task in scores]))
            row[f"eval/{env}/pass@{config.k}"] = float(np.mean([task.passes for task in scores]))
            row[f"eval/{env}/completion_tokens"] = float(np.mean([n for task in scores for n in task.lengths]))
    every = list(results.values())
    outcomes = Counter(result.outcome for result in every)
    row["eval/reward"] = float(np.mean(everything)) if everything else None
    row["eval/failed_rollouts"] = len(every) - len(everything)
    return row | {f"eval/outcome/{outcome}": outcomes[outcome] for outcome in OUTCOMES}
