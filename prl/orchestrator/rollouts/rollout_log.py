"""`<run>/rollouts.jsonl`: every trained rollout as text, for people (debug.keep_rollouts)."""

from __future__ import annotations

import json
from pathlib import Path

from prl.orchestrator.rollouts.producer import StepGroups
from prl.runtime.directory.files import append_objects, read_objects, replace_file


class RolloutLog:
    """One line per rollout: step, env, task, reward, metrics, advantage, policy versions of its tokens, messages."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Rows of steps after `resume_step` are dropped: those steps are about to be done again."""
        kept = [row for row in read_objects(path) if isinstance(step := row.get("step"), int) and step <= resume_step]
        replace_file(path, "".join(json.dumps(row) + "\n" for row in kept))
        self.path = path

    def write(self, step: StepGroups) -> None:
        rows = [
            {
                "step": step.step,
                "group": group.index,
                "env": rollout.env,
                "task": rollout.task,
                "reward": rollout.reward,
                "metrics": rollout.metrics,
                "advantage": rollout.advantage,
                "versions": sorted({v for s in rollout.samples for v in s.versions if v >= 0}),
                "truncated": rollout.truncated,
                "messages": rollout.messages,
            }
            for group in step.groups
            for rollout in group.finished
        ]
        append_objects(self.path, rows)
