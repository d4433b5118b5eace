"""The orchestrator's row of metrics for an optimizer step, as far as counters tell it."""

from __future__ import annotations

from typing import Any

import numpy as np

from prl.config.schema import AlgoConfig
from prl.orchestrator.batching import EncodedStep, lag_columns
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.rollouts.producer import StepGroups
from prl.orchestrator.rollouts.runner import RunnerStats
from prl.orchestrator.rollouts.teacher import teacher_columns


def step_row(
    algo: AlgoConfig, groups: StepGroups, encoded: EncodedStep, engines: EnginePool, stats: RunnerStats
) -> dict[str, Any]:
    finished = [r for g in groups.groups for r in g.finished]
    row: dict[str, Any] = {
        "reward": float(np.mean(groups.sampled_rewards)),
        "reward_std": float(np.std(groups.sampled_rewards)),
        **lag_columns(encoded.lags, algo.max_off_policy_steps),
        **teacher_columns([s for r in finished for s in r.samples], algo.teacher.tau),
        "dropped_stale": groups.dropped_stale,
        "dropped_stale_rollouts": groups.dropped_stale_rollouts,
        "dropped_stale_requests": groups.dropped_stale_requests,
        "dropped_stale_tokens": groups.dropped_stale_tokens,
        "filtered_groups": groups.filtered_groups,
        "no_signal_groups": groups.no_signal_share,
        "failed_groups": groups.failed_groups,
        "failed_rollouts": stats.failures,
        "cancelled_rollouts": stats.cancelled,
        "retried_rollouts": stats.retried,
        "aborted_requests": engines.aborted,
        "retried_requests": engines.retried,
        "engine_restarts": engines.restarts,
        "truncated": groups.truncated_share,
        "completion_tokens": float(np.mean([r.completion_tokens for r in finished])),
        "prompt_tokens": float(np.mean([r.prompt_tokens for r in finished])),
        "turns": float(np.mean([r.turns for r in finished])),
        "rollouts": groups.rollouts,
        "rollouts_inflight": stats.clock.in_flight,
        "work_imbalance": encoded.imbalance,
    }
    return row | ({"last_rollout_error": stats.last_error} if stats.last_error else {})
