"""`<run>/rollouts.jsonl`: every trained rollout as text, for people (debug.keep_rollouts)."""

from __future__ import annotations

import json
from pathlib import Path

from prl.orchestrator.producer import StepGroups


class RolloutLog:
    """One line per rollout: step, env, task, reward, metrics, advantage, policy versions of its tokens, messages."""

    def __init__(self, path: Path, resume_step: int) -> None:
        """Rows of steps after `resume_step` are dropped: those steps are about to be done again."""
        lines = path.read_text().splitlines() if path.exists() else []
        kept = [line for line in lines if line.endswith("}") and json.loads(line)["step"] <= resume_step]
        path.write_text("".join(line + "\n" for line in kept))
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
        with self.path.open("a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
