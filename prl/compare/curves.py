"""One point's metrics as functions of a budget: optimizer steps, tokens trained on, GPU hours."""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from prl.metrics.held_out import REWARD, Lost, last_evaluation, lost_in
from prl.metrics.reader import Row

Axis = Literal["steps", "tokens", "gpu_hours"]
AXES: dict[Axis, str] = {"steps": "optimizer steps", "tokens": "tokens trained on", "gpu_hours": "GPU hours"}
Series = list[tuple[int, float]]  # (step, value), ascending


@dataclass(frozen=True)
class Metric:
    """What points are ranked by, first choice first: `keys` of the role's rows."""

    role: str
    key: str
    label: str
    higher_is_better: bool


HELD_OUT = {
    "rl": Metric("orchestrator", "eval/reward", "held-out reward", True),
    "sft": Metric("trainer.0", "val_loss", "held-out loss", False),
    "eval": Metric("orchestrator", "eval/reward", "held-out reward", True),
}
TRAINING = {
    "rl": Metric("orchestrator", "reward", "training reward", True),
    "sft": Metric("trainer.0", "loss", "training loss", False),
}
FAILED, EVALUATED = "failed_rollouts", "evaluated_rollouts"  # of the last evaluation, where any failed
ROLES = ("trainer.0", "orchestrator")  # whose files are read


@dataclass(frozen=True)
class Curves:
    """The series of one point. `spent[axis][i]` is what `steps[i]` steps had cost; step 0 cost nothing."""

    steps: list[int]
    spent: dict[Axis, list[float]]
    held_out: Series
    training: Series
    figures: dict[str, float]
    evaluations: list[tuple[int, Lost | None]] = field(default_factory=list)  # (step, what it lost), ascending

    def cost(self, axis: Axis, step: int) -> float:
        """Budget spent after `step` steps."""
        return self.spent[axis][bisect_right(self.steps, step) - 1]

    def reached(self, axis: Axis) -> float:
        return self.spent[axis][-1]

    def series(self, held_out: bool) -> Series:
        return self.held_out if held_out else self.training

    def last_within(self, axis: Axis, budget: float, held_out: bool) -> tuple[float, float] | None:
        """(what had been spent, value) of the last value at or before the budget; no value is made up between two."""
        within = [(self.cost(axis, step), value) for step, value in self.series(held_out)]
        within = [pair for pair in within if pair[0] <= budget * (1 + 1e-9)]
        return within[-1] if within else None

    def lost_within(self, axis: Axis, budget: float = math.inf) -> Lost | None:
        """What the last evaluation at or before the budget has lost, whether or not it has a value."""
        within = [lost for step, lost in self.evaluations if self.cost(axis, step) <= budget * (1 + 1e-9)]
        return within[-1] if within else None


def make_curves(job: str, rows: dict[str, list[Row]], devices: int | None) -> Curves:
    """Curves of one point.

    GPU hours count the time in trainer steps, waiting for rollouts included, times all devices of trainer and engines.
    Start-up, warm start, the queue and steps repeated after a preemption are not in it.

    Args:
        rows: role -> its rows. A step written twice (a resumed run in wandb) counts once, as it was the last time.
        devices: of the point; None if unknown, and then there are no GPU hours.
    """
    trainer = _by_step(rows["trainer.0"])
    steps = [step for step in sorted(trainer) if step > 0 and "step_s" in trainer[step]]
    step_s = [_number(trainer[step], "step_s") for step in steps]
    tokens = [_number(trainer[step], "tokens") for step in steps]
    seconds = list(accumulate(step_s, initial=0.0))
    spent: dict[Axis, list[float]] = {
        "steps": [0.0, *map(float, steps)],
        "tokens": list(accumulate(tokens, initial=0.0)),
        "gpu_hours": [s * (devices or 0) / 3600 for s in seconds],
    }
    evaluations = _evaluations(rows["orchestrator"])
    lost = evaluations[-1][1] if evaluations else None
    return Curves(
        [0, *steps],
        spent,
        _series(rows, HELD_OUT.get(job)),
        _series(rows, TRAINING.get(job)),
        _figures([trainer[step] for step in steps], [*_by_step(rows["orchestrator"]).values()], step_s, tokens, devices)
        | ({FAILED: lost.failed, EVALUATED: lost.every} if lost else {})
        | (evaluated_figures(rows["orchestrator"]) if job == "eval" else {}),
        evaluations,
    )


def _figures(
    trainer: list[Row], orchestrator: list[Row], step_s: list[float], tokens: list[float], devices: int | None
) -> dict[str, float]:
    """The point's figures over its whole length. The first step, which compiles and fills caches, is no throughput."""
    if not trainer:
        return {}
    first = min(1, len(trainer) - 1)
    warm_s, total_s = sum(step_s[first:]), sum(step_s)
    rate = sum(tokens[first:]) / warm_s if warm_s else None
    peak_bytes = max(_numbers(trainer, "peak_memory_bytes"), default=None)
    found: dict[str, float | None] = {
        "tokens_per_s": rate,
        "tokens_per_s_per_gpu": rate / devices if rate is not None and devices else None,
        "mfu": _mean(_numbers(trainer[first:], "mfu")),
        "peak_memory_gib": peak_bytes / 2**30 if peak_bytes is not None else None,
        "mismatch_kl": _mean(_numbers(trainer, "mismatch_kl_mean")),
        "staleness": _mean(_numbers(orchestrator, "staleness_mean")),
        "wall_s": total_s,
        "gpu_hours": total_s * devices / 3600 if devices else None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _by_step(rows: list[Row]) -> dict[int, Row]:
    """Several rows of a step become one; what was written last counts."""
    merged: dict[int, Row] = {}
    for row in rows:
        step = row.get("step")
        if isinstance(step, int):
            if step in merged:
                merged[step].update(row)
            else:
                merged[step] = row
    return merged


def _series(rows: dict[str, list[Row]], metric: Metric | None) -> Series:
    if metric is None:
        return []
    values = {
        row["step"]: row[metric.key]
        for row in rows[metric.role]
        if metric.key in row and isinstance(row.get("step"), int)
    }
    return [(step, values[step]) for step in sorted(values) if is_number(values[step])]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and -sys.float_info.max <= value <= sys.float_info.max


def _number(row: Row, key: str) -> float:
    """0 for what is missing or not finite."""
    value = row.get(key)
    return float(value) if value is not None and is_number(value) else 0.0


def _numbers(rows: list[Row], key: str) -> list[float]:
    return [row[key] for row in rows if key in row and is_number(row[key])]


def _mean(values: list[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def _evaluations(rows: list[Row]) -> list[tuple[int, Lost | None]]:
    return [(step, lost_in(row)) for step, row in sorted(_by_step(rows).items()) if REWARD in row]


def evaluated_figures(rows: list[Row]) -> dict[str, float]:
    """Of prl.eval: "ENV avg@K" and "ENV pass@K", and behind them LOW and HIGH, the ends of their intervals."""
    last = last_evaluation(rows)
    found = ((re.fullmatch(r"eval/(.+)/((?:avg|pass)@\d+)(_low|_high)?", key), value) for key, value in last.items())
    return {
        f"{match[1]} {match[2]}{match[3] or ''}": float(value) for match, value in found if match and is_number(value)
    }


LOW, HIGH = "_low", "_high"
