"""What one attempt of a run spends its time on: a partition of the time since its machines were paid for, in seconds.

The root tells warm start, waiting for one, and end. Rows of metrics tell the rest: the trainer's of its steps, before
the first of which all is start, the orchestrator's of evaluations, which count where the trainer stood still for them.
Of what overlaps, only what the trainer waits for is told: rollouts and evaluations beside a step are part of the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

START, SHARED, WARM_START, COMPILATION, STEPS, WAITING, EVALUATION, CHECKPOINTS, END, UNTOLD = PHASES = (
    "start",  # until the first step begins: processes, models, engines and what those compile
    "warm_start_wait",  # for another run that makes the same warm start
    "warm_start",
    "compilation",  # torch.compile in the trainer, wherever in its steps
    "steps",
    "waiting",  # of the trainer: for rollouts, and so for engines and environments
    "evaluation",
    "checkpoints",  # as far as they hold up training
    "end",  # last checkpoint, export, the end of all processes
    "untold",  # of attempts that are known by their agent alone
)
SETTLED = 512  # intervals that are kept for an evaluation that ends later than what followed it
KEPT = 2 * SETTLED

Interval = tuple[str, float, float]  # phase, begin, end; Unix seconds


class Phases:
    """Of one attempt. Stages follow each other, so that their sum is the time from `began` to now."""

    def __init__(self, began: float) -> None:
        self.totals = dict.fromkeys(PHASES, 0.0)
        self.stage, self.since = START, began
        self.told_until = began  # rows have told what was done; they divide the stage START, and no other
        self.intervals: list[Interval] = []
        self.evaluations: list[tuple[float, float]] = []

    def enter(self, stage: str, now: float) -> None:
        """A stage ends where the next one begins."""
        now = max(now, self.since)
        self.totals = self.at(now, ends=True)
        self.stage, self.since, self.told_until = stage, now, now
        self.intervals, self.evaluations = [], []

    @property
    def has_steps(self) -> bool:
        """Whether the stage is that of the job, and its first step is over."""
        return self.stage == START and self.told_until > self.since

    def observe(self, role: str, row: dict[str, Any]) -> None:
        """A row of metrics of the trainer's first rank or of the orchestrator; rows of an earlier attempt tell nothing
        of this one.
        """
        if self.stage != START or not isinstance(row.get("time"), int | float):
            return
        if role == "orchestrator" and "eval_s" in row and row["time"] > self.since:
            self.evaluations.append((row["time"] - _number(row, "eval_s"), row["time"]))
        if role == "trainer" and "step_s" in row and row["time"] > self.told_until:
            self.intervals += self._parts_of_step(row)
            self.told_until = self.intervals[-1][2]
            if len(self.intervals) > KEPT:
                self._settle(SETTLED)

    def at(self, now: float, ends: bool = False) -> dict[str, float]:
        """Seconds of each phase until now. What no row has told of yet belongs to the step under way, or, if the job
        `ends` now, to its end.
        """
        totals, now = dict(self.totals), max(now, self.since)
        if self.stage != START:
            totals[self.stage] += now - self.since
            return totals
        rest = START if not self.has_steps else END if ends else STEPS
        untold = (rest, self.told_until, now)
        for phase, seconds in _divide([*self.intervals, untold], self.evaluations):
            totals[phase] += seconds
        return totals

    def _parts_of_step(self, row: dict[str, Any]) -> list[Interval]:
        """Without gaps from what was told before; clocks of other nodes may differ a little."""
        end = max(row["time"], self.told_until)
        begin = min(max(end - _number(row, "step_s"), self.told_until), end)
        busy = min(begin + _number(row, "wait_for_batch_s"), end)
        saving = max(end - _number(row, "save_s"), busy)
        compiled = min(busy + _number(row, "compile_s"), saving)
        validating = max(saving - _number(row, "val_s"), compiled)
        between = CHECKPOINTS if self.has_steps else START
        return [
            (between, self.told_until, begin),
            (WAITING, begin, busy),
            (COMPILATION, busy, compiled),
            (STEPS, compiled, validating),
            (EVALUATION, validating, saving),
            (CHECKPOINTS, saving, end),
        ]

    def _settle(self, count: int) -> None:
        for phase, seconds in _divide(self.intervals[:count], self.evaluations):
            self.totals[phase] += seconds
        self.intervals = self.intervals[count:]
        self.since = self.intervals[0][1]
        self.evaluations = [pair for pair in self.evaluations if pair[1] > self.since]


def _divide(intervals: list[Interval], evaluations: list[tuple[float, float]]) -> Iterator[tuple[str, float]]:
    """Phases and their seconds; where the trainer stood still for an evaluation, that is the phase."""
    for phase, begin, end in intervals:
        evaluated = 0.0
        if phase in (START, WAITING, END):
            evaluated = sum(max(0.0, min(end, to) - max(begin, since)) for since, to in evaluations)
        evaluated = min(evaluated, max(0.0, end - begin))
        yield EVALUATION, evaluated
        yield phase, max(0.0, end - begin) - evaluated


def _number(row: dict[str, Any], key: str) -> float:
    value = row.get(key)
    return max(0.0, float(value)) if isinstance(value, int | float) and value == value else 0.0
