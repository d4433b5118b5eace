"""Evaluations that are not whole: how many of an evaluation's rollouts failed, which are in none of its means."""

from __future__ import annotations

from dataclasses import dataclass

from prl.metrics.reader import Row
from prl.runtime.directory.shapes import is_number

REWARD, OUTCOMES = "eval/reward", "eval/outcome/"  # the second one: beginning of the keys of counts, by outcome
MOST_LOST = 0.1  # share of rollouts; of what is left beyond it nobody knows whether it is the easy tasks alone


@dataclass(frozen=True)
class Lost:
    """Rollouts of one evaluation."""

    failed: int
    every: int

    @property
    def is_much(self) -> bool:
        """Whether the means of the others say too little of the policy to compare it by them."""
        return self.failed > MOST_LOST * self.every

    def __str__(self) -> str:
        return f"{self.failed} of {self.every} rollouts of its last evaluation failed and count for nothing"


def lost_in(row: Row) -> Lost | None:
    """Of a row with an evaluation; None where none of its rollouts failed, or the row has no evaluation."""
    failed = row.get("eval/failed_rollouts")
    every = sum(row[key] for key in row if key.startswith(OUTCOMES) and is_number(row[key]))
    return Lost(int(failed), int(every)) if is_number(failed) and failed and every else None


def last_evaluation(rows: list[Row]) -> Row:
    """The newest row with an evaluation, whose reward is None if all of its rollouts failed; empty without one."""
    return next((row for row in reversed(rows) if REWARD in row), {})
