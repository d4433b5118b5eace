"""The comparison as rows and cells, as text for a terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import io
import json
import textwrap
from dataclasses import dataclass
from typing import Any

from prl.compare.columns import value_of
from prl.compare.curves import EVALUATED, FAILED, HIGH, LOW
from prl.compare.hours import attempts_as_json
from prl.compare.points import Point
from prl.compare.ranking import Comparison, Group
from prl.compare.stats import FOOTNOTE
from prl.runtime.directory.hours import totals
from prl.runtime.directory.phases import PHASES
from prl.runtime.people.faults import within
from prl.runtime.people.view import clock

FIGURES = {  # figure -> heading
    "tokens_per_s": "tokens/s",
    "tokens_per_s_per_gpu": "per GPU",
    "mfu": "MFU",
    "peak_memory_gib": "peak GiB",
    "mismatch_kl": "mismatch KL",
    "staleness": "staleness",
    "wall_s": "wall",
    "gpu_hours": "GPU hours",
    "paid_gpu_hours": "paid GPU hours",
    "in_steps": "in steps",
}
LOST = (FAILED, EVALUATED)
ABOUT_FIGURES = (
    "tokens/s: tokens trained on per second of trainer steps, waiting for rollouts included, without the first step; "
    "per GPU: divided by the devices of trainer and engines. wall and GPU hours: time in trainer steps, and that times "
    "devices; start-up, warm start and queue are not in it."
)
ABOUT_EVALUATIONS = (
    "avg@k and pass@k: means over an environment's tasks, behind them the 95 % interval over tasks of one evaluation "
    "(prl/orchestrator/intervals.py): which tasks were drawn, not which seed trained."
)
ABOUT_PAID = (
    "paid GPU hours: from allocation to release (without SLURM from the start of the process to its exit), times the "
    "devices that were held, over all attempts; ≥: an attempt was killed, and its last moments are not known, or it is "
    "wandb's copy, written before the end of the run, which has no share in steps. A CPU "
    "slot counts as a GPU where there are none. in steps: the share of trainer steps, with waiting for rollouts and "
    "without compilation, evaluation and checkpoints; --phases tells the rest."
)
WIDTH = 118  # characters of a note
WHY_WIDTH = 70


@dataclass(frozen=True)
class Cell:
    """What is shown, and what it is sorted by."""

    text: str
    sort: float | str | None = None

    @property
    def is_number(self) -> bool:
        return isinstance(self.sort, int | float)


@dataclass(frozen=True)
class Table:
    headings: list[str]
    rows: list[list[Cell]]


def has_groups(comparison: Comparison) -> bool:
    """Whether any group has several points; else the table of points says it all."""
    return any(len(group.points) > 1 for group in comparison.groups)


def group_table(comparison: Comparison) -> Table:
    """One row per group, best first."""
    shown = _shown_figures(comparison)
    value = comparison.metric.label if comparison.metric else "value"
    headings = ["rank", *comparison.group_columns, "seeds", value, "± 95 %", "against the best", "p", *shown.values()]
    rows = []
    for group in comparison.groups:
        ranked, count = len(group.values), len(group.seeds)
        rows.append(
            [
                _number(group.rank, "d"),
                *map(swept_value, group.key),
                Cell(str(count) if ranked == count else f"{ranked}/{count}", ranked),
                _number(group.mean),
                _number(group.half_width, ".2g"),
                Cell(group.verdict, group.verdict),
                _number(group.p, ".2g"),
                *(_figure(name, group.figure(name), group.costs_more) for name in shown),
            ]
        )
    return _without_empty(Table(headings, rows))


def point_table(comparison: Comparison) -> Table:
    """One row per point, in the order of the groups."""
    shown = _shown_figures(comparison)
    value = comparison.metric.label if comparison.metric else "value"
    points = ordered_points(comparison)
    with_why = any(point.why for _, point in points)
    columns = comparison.columns or ["run"]
    headings = ["rank", *columns, "state", "step", value, *shown.values(), *(["why"] if with_why else [])]
    rows = []
    for group, point in points:
        at_least = point.hours is not None and point.hours.at_least
        rows.append(
            [
                _number(group.rank if point.name in comparison.ranked else None, "d"),
                *(swept_value(value_of(point, key) if key != "run" else point.name) for key in columns),
                Cell(point.state, point.state),
                Cell(f"{point.step}/{point.max_steps}" if point.max_steps else "-", point.step),
                _number(comparison.values.get(point.name, (0, None))[1]),
                *(_figure(name, point.figures.get(name), at_least, _interval(point, name)) for name in shown),
                *([Cell(_short(point), point.why)] if with_why else []),
            ]
        )
    return Table(headings, rows)


def ordered_points(comparison: Comparison) -> list[tuple[Group, Point]]:
    """Points in the order of their groups, the best of each first."""
    return [(group, point) for group in comparison.groups for point in _ordered(comparison, group)]


def _without_empty(table: Table) -> Table:
    kept = [i for i in range(len(table.headings)) if any(row[i].text for row in table.rows)]
    return Table([table.headings[i] for i in kept], [[row[i] for i in kept] for row in table.rows])


def footnotes(comparison: Comparison) -> list[str]:
    """The notes that belong under the tables, formulas and their sources last."""
    notes = list(comparison.notes)
    if any(group.half_width is not None for group in comparison.groups):
        notes.append(FOOTNOTE)
    shown = _shown_figures(comparison)
    if any("@" in name for name in shown):
        notes.append(ABOUT_EVALUATIONS)
    if set(shown) & {"tokens_per_s", "wall_s", "gpu_hours"}:
        notes.append(ABOUT_FIGURES)
    if "paid_gpu_hours" in _shown_figures(comparison):
        notes.append(ABOUT_PAID)
    return notes


def render_text(comparison: Comparison, more: tuple[Table, ...] = ()) -> str:
    """
    Args:
        more: tables to follow those of groups and points.
    """
    tables = [group_table(comparison)] if has_groups(comparison) else []
    parts = [_align(table) for table in (*tables, point_table(comparison), *more)]
    parts.append("\n".join(map(fill_note, footnotes(comparison))))
    return "\n\n".join([counts_line(comparison), *parts])


def fill_note(note: str) -> str:
    return textwrap.fill(note, WIDTH, subsequent_indent="  ")


def counts_line(comparison: Comparison) -> str:
    """The title, and how many points are in which state."""
    states = [point.state for point in comparison.points]
    counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states)))
    return f"{comparison.title}: {len(states)} point{'s' * (len(states) != 1)} ({counts})"


def render_csv(comparison: Comparison) -> str:
    """One line per point, numbers unrounded."""
    text = io.StringIO()
    fields = [
        "point",
        "point_id",
        *comparison.columns,
        "state",
        "why",
        "step",
        "group_rank",
        "spent",
        "value",
        *FIGURES,
        *(f"{phase}_s" for phase in PHASES),
        *LOST,
    ]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(fields)
    for group, point in ordered_points(comparison):
        spent, value = comparison.values.get(point.name, ("", ""))
        figures = point.figures
        seconds = totals(point.hours.attempts) if point.hours else {}
        keys = [value_of(point, key) for key in comparison.columns]
        head = [point.name, point.point_id, *keys, point.state, point.why, point.step, group.rank or ""]
        cost = [figures.get(name, "") for name in FIGURES] + [seconds.get(phase, "") for phase in PHASES]
        cost += [figures.get(name, "") for name in LOST]
        writer.writerow([*head, spent, value, *cost])
    return text.getvalue()


def render_json(comparison: Comparison) -> str:
    document = {
        "title": comparison.title,
        "metric": comparison.metric.label if comparison.metric else None,
        "higher_is_better": comparison.metric.higher_is_better if comparison.metric else None,
        "at": comparison.axis,
        "budget": comparison.budget,
        "columns": comparison.columns,
        "groups": [_group_as_json(comparison, group) for group in comparison.groups],
        "notes": footnotes(comparison),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _group_as_json(comparison: Comparison, group: Group) -> dict[str, Any]:
    return {
        "swept": dict(zip(comparison.group_columns, group.key, strict=True)),
        "rank": group.rank,
        "mean": group.mean,
        "half_width_95": group.half_width,
        "p_against_best": group.p,
        "verdict": group.verdict,
        "points": [_point_as_json(comparison, point) for point in _ordered(comparison, group)],
    }


def _point_as_json(comparison: Comparison, point: Point) -> dict[str, Any]:
    spent, value = comparison.values.get(point.name, (None, None))
    return {
        "point": point.name,
        "point_id": point.point_id,
        "swept": {key: value_of(point, key) for key in comparison.columns},
        "state": point.state,
        "why": point.why,
        "step": point.step,
        "spent": spent,
        "value": value,
        "figures": point.figures,
        "attempts": attempts_as_json(point.hours),
    }


def _ordered(comparison: Comparison, group: Group) -> list[Point]:
    """The best first; points without a value last, in their own order."""
    sign = -1 if comparison.metric is None or comparison.metric.higher_is_better else 1
    values = comparison.values
    return sorted(group.points, key=lambda p: sign * values[p.name][1] if p.name in values else float("inf"))


def _shown_figures(comparison: Comparison) -> dict[str, str]:
    known = dict.fromkeys(name for point in comparison.points for name in point.figures)
    evaluated = {name: name for name in known if "@" in name and not name.endswith((LOW, HIGH))}
    others = {name: heading for name, heading in FIGURES.items() if name in known}
    if evaluated:
        others.pop("in_steps", None)  # there are none
    return evaluated | others


def _short(point: Point) -> str:
    """Files as they lie beside each other, for a long path would leave no room for what is wrong with them."""
    why = point.why if point.directory is None else within(point.directory, point.why)
    return why if len(why) <= WHY_WIDTH else f"{why[: WHY_WIDTH - 1]}…"


def _interval(point: Point, name: str) -> str:
    """Of what an evaluation says of its tasks; nothing for other figures."""
    low, high = (point.figures.get(f"{name}{end}") for end in (LOW, HIGH))
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def _figure(name: str, value: float | None, at_least: bool = False, interval: str = "") -> Cell:
    if value is None:
        return Cell("")
    if "@" in name:
        return Cell(f"{value:.4f}{interval}", value)
    if name == "paid_gpu_hours":
        return Cell(f"{'≥ ' * at_least}{value:.3g}", value)
    if name == "in_steps":
        return Cell(f"{value:.0%}", value)
    if name == "wall_s":
        return Cell(clock(value), value)
    if name.startswith("tokens"):
        return Cell(f"{value:,.0f}", value)
    return Cell(f"{value:.3g}", value)


def _number(value: float | None, form: str = ".4f") -> Cell:
    return Cell("") if value is None else Cell(format(value, form), value)


def swept_value(text: str) -> Cell:
    """A swept value, sorted as a number if it is one."""
    try:
        return Cell(text, float(text))
    except ValueError:
        return Cell(text, text)


def _align(table: Table) -> str:
    """Columns two spaces apart, numbers to the right."""
    right = [all(row[i].is_number or not row[i].text for row in table.rows) for i in range(len(table.headings))]
    lines = [table.headings, *([cell.text for cell in row] for row in table.rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(table.headings))]
    return "\n".join(
        "  ".join(
            text.rjust(width) if to_right else text.ljust(width)
            for text, width, to_right in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )
