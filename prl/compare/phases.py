"""The table of `--phases`: what the paid time of each point and attempt went into."""

from __future__ import annotations

from prl.compare.columns import value_of
from prl.compare.points import Point
from prl.compare.ranking import Comparison
from prl.compare.table import Cell, Table, ordered_points, swept_value
from prl.runtime.directory.hours import Attempt
from prl.runtime.directory.phases import PHASES
from prl.runtime.people.view import clock

HEADINGS = {"warm_start": "warm start", "warm_start_wait": "wait for warm start"}  # others are called as they are
ABOUT_PHASES = (
    "Phases, in time, sum up to total. start: until the first step begins, engines' own compilation included; wait for "
    "warm start: for another run that makes the same; compilation: torch.compile in the trainer; waiting: of the "
    "trainer for rollouts; evaluation and checkpoints: as far as training stood still for them; end: last checkpoint, "
    "export, the end of all processes. untold: of an attempt that never got so far as to tell, or of an older version. "
    "Time in SLURM's queue is in none."
)


AT_LEAST = KILLED, NOT_TOLD = "killed", "not told"


def phase_table(comparison: Comparison) -> Table:
    """One row per point and attempt, in the order of the points, without phases that none has spent time on."""
    columns = comparison.columns or ["run"]
    told = [(point, attempt) for _, point in ordered_points(comparison) for attempt in _attempts(point)]
    shown = [phase for phase in PHASES if any(attempt.seconds.get(phase) for _, attempt in told)]
    headings = [HEADINGS.get(phase, phase) for phase in shown]
    rows = [
        [
            *(swept_value(value_of(point, key) if key != "run" else point.name) for key in columns),
            Cell(str(attempt.number), attempt.number),
            Cell(_ended(point, attempt)),
            Cell("" if attempt.devices is None else f"{attempt.devices:g}", attempt.devices),
            *(_time(attempt.seconds.get(phase, 0.0)) for phase in shown),
            _time(attempt.paid_s),
            Cell(f"{'≥ ' * (_ended(point, attempt) in AT_LEAST)}{attempt.device_hours:.3g}", attempt.device_hours),
        ]
        for point, attempt in told
    ]
    return Table([*columns, "attempt", "ended", "devices", *headings, "total", "paid GPU hours"], rows)


def groups_of_rows(comparison: Comparison) -> list[int]:
    """Of each row of the table, the index of its group."""
    indices = {id(group): index for index, group in enumerate(comparison.groups)}
    return [indices[id(group)] for group, point in ordered_points(comparison) for _ in _attempts(point)]


def _attempts(point: Point) -> list[Attempt]:
    return [] if point.hours is None else point.hours.attempts


def _ended(point: Point, attempt: Attempt) -> str:
    assert point.hours is not None
    if attempt.number in point.hours.killed:
        return KILLED
    if point.hours.is_partial:
        return NOT_TOLD
    return "yes" if attempt.is_over else "not yet"


def _time(seconds: float) -> Cell:
    return Cell(clock(seconds) if seconds else "", seconds)
