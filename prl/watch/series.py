"""The metrics of one run in memory: each key of each role as a series over steps, and rows for the timeline."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from prl.compare.curves import is_number
from prl.metrics.reader import Row, Tail
from prl.watch.following import Lines

MOST_POINTS = 400  # of a series that is sent
CHARTS: dict[str, list[tuple[str, str]]] = {  # title -> (role's file, key)
    "reward": [("orchestrator", "reward"), ("orchestrator", "eval/reward")],
    "loss": [("trainer.0", "loss"), ("trainer.0", "val_loss")],
    "mismatch KL": [("trainer.0", "mismatch_kl_mean"), ("trainer.0", "mismatch_kl_p999")],
    "entropy": [("trainer.0", "entropy")],
    "KL from the teacher": [("orchestrator", "teacher_kl")],
    "tokens per rollout": [("orchestrator", "completion_tokens"), ("orchestrator", "prompt_tokens")],
    "truncated share": [("orchestrator", "truncated"), ("trainer.0", "masked_fraction")],
    "tokens per second": [("trainer.0", "tokens_per_s")],
    "tokens sampled per second": [("orchestrator", "tokens_per_s")],  # in bursts, where batches lie ready
    "peak memory, bytes": [("trainer.0", "peak_memory_bytes")],
    "staleness, steps": [("orchestrator", "staleness_mean"), ("orchestrator", "staleness_max")],
    "waiting, s": [("trainer.0", "wait_for_batch_s"), ("orchestrator", "wait_for_rollouts_s")],
    "gradient norm": [("trainer.0", "grad_norm")],
}
TIMED = ("step_s", "wait_for_rollouts_s", "weight_update_s", "eval_s", "trainer_busy_s", "generating_spans")


class Series:
    """All metrics files of one run, read once and then followed."""

    def __init__(self, run_dir: Path) -> None:
        self.directory = run_dir / "metrics"
        self.clear()

    def clear(self) -> None:
        self.tails: dict[str, tuple[Lines, Tail]] = {}
        self.values: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self.timed: dict[str, list[Row]] = defaultdict(list)

    def poll(self) -> None:
        """Read what was appended; all anew where a file was cut back."""
        if any(lines.was_replaced() for lines, _ in self.tails.values()):
            self.clear()
        for path in sorted(self.directory.glob("*.jsonl")):
            if path.stem not in self.tails:
                self.tails[path.stem] = Lines(path), Tail(path)
            lines, tail = self.tails[path.stem]
            lines.was_replaced()
            for row in tail.poll():
                self._take(path.stem, row)
            lines.offset = tail.offset

    def _take(self, stem: str, row: Row) -> None:
        step = row.get("step")
        if not isinstance(step, int):
            return
        for key, value in row.items():
            if type(value) in (int, float) and is_number(value) and key not in ("step", "time"):
                self.values[stem, key][step] = value
        if any(key in row for key in TIMED):
            self.timed[stem].append(row)

    def line(self, role: str, key: str) -> list[tuple[int, float]]:
        """(step, value), ascending; every so many of a long one, and its last."""
        return thin(sorted(self.values.get((role, key), {}).items()))

    def charts(self) -> list[dict[str, Any]]:
        """What a run's page draws, without charts that have nothing."""
        found = []
        for title, keys in CHARTS.items():
            lines = [{"name": f"{role} {key}", "points": self.line(role, key)} for role, key in keys]
            if any(line["points"] for line in lines):
                found.append({"title": title, "lines": [line for line in lines if line["points"]]})
        return found


def thin(points: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """At most MOST_POINTS of them, and the last."""
    stride = -(-len(points) // MOST_POINTS) or 1
    return points[::stride] + (points[-1:] if (len(points) - 1) % stride else [])
