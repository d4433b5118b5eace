"""Held-out evaluation: k samples per task, avg@k and pass@k."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np

from prl.config.schema import EvalConfig, SamplingConfig
from prl.orchestrator.rollout import Rollout
from prl.orchestrator.runner import RolloutRunner
from prl.orchestrator.tasks import TaskChoice


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples passes (arXiv:2107.03374, eq. 1)."""
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_samples - num_passed + 1, num_samples + 1)))


def choose_tasks(count: int, wanted: int) -> list[int]:
    """The same held-out tasks at every evaluation, and for every seed of the run: points of a sweep stay comparable."""
    return sorted(random.Random(0).sample(range(count), min(wanted, count)))


async def evaluate(
    runner: RolloutRunner, config: EvalConfig, sampling: SamplingConfig, counts: dict[str, int], version: int
) -> dict[str, Any]:
    """Metrics of the policy that the engines serve now.

    eval/reward is the mean over all samples of all environments; eval/<env>/avg@k, pass@k, and the number of failed
    rollouts, which count as neither.
    """
    temperature = sampling.temperature if config.temperature is None else config.temperature
    drawn = sampling.model_copy(update={"temperature": temperature})
    jobs: dict[tuple[str, int], list[asyncio.Task[Rollout | None]]] = {}
    for env in sorted(counts):
        for index in choose_tasks(counts[env], config.num_tasks):
            names = [f"eval-{version:06d}-{env}-{index:06d}-{i:04d}" for i in range(config.k)]
            jobs[env, index] = [runner.start_rollout(TaskChoice(env, index), "held_out", n, drawn) for n in names]
    row: dict[str, Any] = {}
    everything: list[float] = []
    failed = 0
    for env in sorted(counts):
        averages, passes, lengths = [], [], []
        for (name, _), tasks in jobs.items():
            if name != env:
                continue
            results = [result for result in await asyncio.gather(*tasks) if result is not None]
            failed += len(tasks) - len(results)
            if not results:
                continue
            rewards = [result.reward for result in results]
            everything += rewards
            averages.append(float(np.mean(rewards)))
            passed = sum(reward >= config.pass_threshold for reward in rewards)
            passes.append(pass_at_k(len(rewards), passed, min(config.k, len(rewards))))
            lengths += [result.completion_tokens for result in results]
        if averages:
            row[f"eval/{env}/avg@{config.k}"] = float(np.mean(averages))
            row[f"eval/{env}/pass@{config.k}"] = float(np.mean(passes))
            row[f"eval/{env}/completion_tokens"] = float(np.mean(lengths))
    row["eval/reward"] = float(np.mean(everything)) if everything else None
    row["eval/failed_rollouts"] = failed
    return row
