"""What points have cost, from allocation to release and over all attempts, and what that time went into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prl.runtime.directory.hours import SUMMARY, Attempt, is_killed, read_hours
from prl.runtime.directory.phases import PHASES, STEPS, UNTOLD, WAITING


@dataclass(frozen=True)
class PaidHours:
    """Of one point. `killed`: numbers of the attempts that may have cost more than is known.

    `is_partial`: as a copy tells it, whose last word comes before the end of the run.
    """

    attempts: list[Attempt]
    killed: frozenset[int] = frozenset()
    is_partial: bool = False

    @property
    def at_least(self) -> bool:
        return bool(self.killed) or self.is_partial

    def figures(self) -> dict[str, float]:
        """GPU hours, and the share of them in trainer steps, which wait for rollouts, if a phase was told at all, and
        the whole is known.
        """
        paid = sum(attempt.device_hours for attempt in self.attempts)
        if not paid:
            return {}
        if self.is_partial or all(attempt.seconds.keys() <= {UNTOLD} for attempt in self.attempts):
            return {"paid_gpu_hours": paid}
        in_steps = sum(
            attempt.seconds.get(phase, 0.0) * (attempt.devices or 0) / 3600
            for attempt in self.attempts
            for phase in (STEPS, WAITING)
        )
        return {"paid_gpu_hours": paid, "in_steps": in_steps / paid}


def attempts_as_json(hours: PaidHours | None) -> list[dict[str, Any]]:
    """`killed`: it may have cost more than is known."""
    if hours is None:
        return []
    return [
        asdict(attempt)
        | {"paid_s": attempt.paid_s, "gpu_hours": attempt.device_hours, "killed": attempt.number in hours.killed}
        for attempt in hours.attempts
    ]


def read_paid_hours(path: Path, devices: int | None, state: str) -> PaidHours | None:
    """Of a run directory; None where nothing was recorded. `state` is the point's, which tells who is still alive."""
    attempts = read_hours(path, devices)
    killed = {a.number for a in attempts if is_killed(a, a is attempts[-1], state)}
    return PaidHours(attempts, frozenset(killed)) if attempts else None


def from_summary(summary: Mapping[str, Any]) -> PaidHours | None:
    """Of a wandb run, as `prl.runtime.directory.hours.summarise` has put it there: all attempts as one. The mirror ends
    just before the run does, and cannot tell what that costs.
    """
    values = {phase: summary.get(f"{SUMMARY}/{phase}_s") for phase in PHASES}
    seconds = {phase: float(value) for phase, value in values.items() if isinstance(value, int | float)}
    hours = summary.get(f"{SUMMARY}/gpu_hours")
    if not isinstance(hours, int | float) or not sum(seconds.values()):
        return None
    total_s = sum(seconds.values())
    devices = hours * 3600 / total_s  # on average, if attempts had different ones
    return PaidHours([Attempt(1, None, round(devices, 3), 0.0, total_s, False, seconds)], is_partial=True)
