"""Groups of points that differ in their seed alone, ranked at a budget that all of them have spent."""

from __future__ import annotations

from dataclasses import dataclass, field

from prl.compare.columns import ABSENT, SEED, differing_behind, swept_columns, value_of
from prl.compare.curves import AXES, HELD_OUT, TRAINING, Axis, Metric
from prl.compare.points import Point
from prl.compare.stats import half_width, holm, mean, welch_p
from prl.compare.tasks import tasks_of
from prl.config.errors import UserError
from prl.runtime.process.failures import some_names

ALPHA = 0.05
SHOWN = 3  # points of a job
MOST_NAMED = 12  # keys in a note
CLOSE = 0.95  # of the budget: a value from before that is worth a word


@dataclass
class Group:
    """Points with the same values of all columns but the seed. `values` are those of the ranked points, one for each
    seed: runs that repeat one say nothing new of how far seeds differ, and count by their mean.
    """

    key: tuple[str, ...]
    points: list[Point]
    values: list[float] = field(default_factory=list)
    rank: int | None = None
    p: float | None = None  # against the best, corrected
    verdict: str = ""

    @property
    def mean(self) -> float | None:
        return mean(self.values) if self.values else None

    @property
    def half_width(self) -> float | None:
        return half_width(self.values)

    def figure(self, name: str) -> float | None:
        """Mean of a figure over the points that have it and are done; over all that have it if none is done."""
        of_done = [p.figures[name] for p in self.points if p.is_done and name in p.figures]
        of_all = [p.figures[name] for p in self.points if name in p.figures]
        chosen = of_done or of_all
        return mean(chosen) if chosen else None

    @property
    def seeds(self) -> dict[str, list[Point]]:
        """Points by their seed; one whose seed is not known is taken for one of its own."""
        found: dict[str, list[Point]] = {}
        for point in self.points:
            seed = value_of(point, SEED)
            found.setdefault(point.name if seed == ABSENT else seed, []).append(point)
        return found

    @property
    def costs_more(self) -> bool:
        """Whether any of its points may have cost more than is known."""
        return any(point.hours is not None and point.hours.at_least for point in self.points)


@dataclass
class Comparison:
    """All that tables, files and page show. `values`: (spent, value) of points that got to the budget, by name."""

    title: str
    axis: Axis
    metric: Metric | None
    held_out: bool
    budget: float | None
    columns: list[str]
    groups: list[Group]
    values: dict[str, tuple[float, float]]
    ranked: set[str]  # names of the points that count
    notes: list[str]

    @property
    def group_columns(self) -> list[str]:
        return [key for key in self.columns if key != SEED]

    @property
    def points(self) -> list[Point]:
        return [point for group in self.groups for point in group.points]


def compare(title: str, points: list[Point], axis: Axis) -> Comparison:
    """Group, and rank at the largest budget that all finished points reached.

    Raises UserError when the axis cannot be told for a point.
    """
    jobs = sorted({point.job for point in points if point.job})
    if len(jobs) > 1:
        of_jobs = {job: [point.name for point in points if point.job == job] for job in jobs}
        raise UserError(
            f"{title} holds points of different jobs: {', '.join(jobs)}",
            where="; ".join(
                f"{job}: {', '.join(names[:SHOWN])}{f' and {len(names) - SHOWN} more' * (len(names) > SHOWN)}"
                for job, names in of_jobs.items()
            ),
            why=_why_apart(jobs),
            fix="name points of one job; evaluations of the runs (python -m prl.eval) compare their policies",
        )
    columns = swept_columns(points)
    job = jobs[0] if jobs else ""
    metric, held_out = _choose_metric(job, points)
    result = Comparison(title, axis, metric, held_out, None, columns, _group(points, columns), {}, set(), [])
    ranked = _choose_ranked(result, points)
    result.ranked = {point.name for point in ranked}
    if metric is not None and ranked:
        _measure(result, ranked)
    _rank(result)
    _add_notes(result, len(ranked), job)
    return result


def _why_apart(jobs: list[str]) -> str:
    if "sft" in jobs:
        return "a reward and a loss cannot be ranked together"
    return "an evaluation spends no budget of training, and points of rl are compared at one that all of them reached"


def _choose_metric(job: str, points: list[Point]) -> tuple[Metric | None, bool]:
    held_out = any(point.curves and point.curves.held_out for point in points)
    return (HELD_OUT if held_out else TRAINING).get(job), held_out


def _group(points: list[Point], columns: list[str]) -> list[Group]:
    groups: dict[tuple[str, ...], Group] = {}
    for point in points:
        key = tuple(value_of(point, column) for column in columns if column != SEED)
        groups.setdefault(key, Group(key, [])).points.append(point)
    return list(groups.values())


def _choose_ranked(result: Comparison, points: list[Point]) -> list[Point]:
    """Finished points with values; while none has finished, all that have any."""
    with_values = [point for point in points if point.curves and point.curves.series(result.held_out)]
    if result.held_out:
        with_values = _complete(result, with_values)
    done = [point for point in with_values if point.is_done]
    if with_values and not done:
        result.notes.append("No point has finished yet: those with values are ranked, whatever becomes of them.")
    ranked = done or with_values
    unknown = [point.name for point in ranked if point.curves and not point.curves.reached(result.axis)]
    if unknown and result.axis != "steps":
        raise UserError(
            f"the {AXES[result.axis]} of {unknown[0]} are not known",
            where=f"--at {result.axis}",
            why="its metrics or its plan do not hold them",
            fix="--at steps",
        )
    return ranked


def _complete(result: Comparison, points: list[Point]) -> list[Point]:
    """Without those that lost too many rollouts of their last evaluation: what is left may be its easy tasks."""
    lost = {p.name: found for p in points if p.curves and (found := p.curves.lost_within(result.axis))}
    for name, found in lost.items():
        result.notes.append(f"{name}: {found}" + ("; it is not ranked." if found.is_much else "."))
    return [point for point in points if point.name not in lost or not lost[point.name].is_much]


def _measure(result: Comparison, ranked: list[Point]) -> None:
    """The common budget, and every point's value at it if it got that far."""
    result.budget = min(point.curves.reached(result.axis) for point in ranked if point.curves)
    for point in result.points:
        if point.curves and point.curves.reached(result.axis) >= result.budget:
            found = point.curves.last_within(result.axis, result.budget, result.held_out)
            lost = point.curves.lost_within(result.axis, result.budget) if result.held_out else None
            if found is not None and (lost is None or not lost.is_much):
                result.values[point.name] = found
            elif found is not None and lost is not None and point.name in result.ranked:
                failed = f"{lost.failed} of {lost.every} rollouts of its evaluation there failed"
                result.notes.append(f"{point.name}: {failed} and count for nothing; it is not ranked.")
    trained = {point.name for point in result.points if point.job != "eval"}
    untrained = [name for name, (spent, _) in result.values.items() if not spent and name in trained]
    if len(untrained) < len(result.values):
        for name in untrained:
            del result.values[name]
            what = "it was evaluated before its first step, and next beyond the budget"
            result.notes.append(f"{name}: {what}; it is not ranked.")


def _rank(result: Comparison) -> None:
    """Order groups by their mean, and points within a group by theirs; then say what can be told from the best."""
    sign = -1 if result.metric is None or result.metric.higher_is_better else 1
    for group in result.groups:
        counted = [
            [p.name for p in points if p.name in result.ranked and p.name in result.values]
            for points in group.seeds.values()
        ]
        group.values = [mean([result.values[name][1] for name in names]) for names in counted if names]
    result.groups.sort(key=lambda g: (not g.values, sign * g.mean if g.mean is not None else 0.0))
    alike: dict[str, list[Group]] = {}
    for group in result.groups:
        if group.values:
            told = (tasks_of(point, result.held_out) for point in group.points)  # one that was never begun has none
            alike.setdefault(next(filter(None, told), ""), []).append(group)
    for groups in alike.values():
        for number, group in enumerate(groups, 1):
            group.rank = number
        if len(groups) > 1:
            _judge(groups[0], groups[1:])
    if len(alike) > 1:
        order = [group for groups in alike.values() for group in groups]
        result.groups = [*order, *(group for group in result.groups if not group.values)]
        result.notes.append(
            "Their tasks differ (environments, their arguments, eval.num_tasks, data): ranks begin anew for each, and "
            "no value is better or worse than one of other tasks."
        )


def _judge(best: Group, others: list[Group]) -> None:
    best.verdict = "best"
    raw = [(group, welch_p(best.values, group.values)) for group in others]
    tested = [(group, p) for group, p in raw if p is not None]
    for group, _ in raw:
        group.verdict = "too few seeds"
    for (group, _), p in zip(tested, holm([p for _, p in tested]), strict=True):
        group.p = p
        group.verdict = "indistinguishable" if p > ALPHA else "worse"


def _add_notes(result: Comparison, ranked: int, job: str) -> None:
    if behind := differing_behind(result.points, result.columns):
        named = ", ".join(behind[:MOST_NAMED]) + (f" and {len(behind) - MOST_NAMED} more" * (len(behind) > MOST_NAMED))
        result.notes.append(f"These points differ in other choices, too: {named}.")
    result.notes += _notes_on_code(result.points)
    if result.budget is None or result.metric is None:
        result.notes.append("No point has a value to rank by.")
        return
    if job == "eval":
        result.notes.insert(
            0, f"{result.metric.label} (higher is better): the mean over all samples of each evaluation."
        )
        if len(result.groups) > 1 and all(len(group.values) < 2 for group in result.groups):
            result.notes.append("One evaluation each: their intervals over tasks say how sure each value is by itself.")
        return
    unit, budget = AXES[result.axis], format_budget(result.axis, result.budget)
    better = "higher" if result.metric.higher_is_better else "lower"
    which = f"the most that all {ranked} ranked points reached" if ranked > 1 else "the end of the one ranked point"
    head = f"{result.metric.label} ({better} is better) at {budget} {unit}, {which}"
    head += "; each value is the last at or before it"
    used = [spent for name, (spent, _) in result.values.items()]
    if used and result.budget and min(used) < CLOSE * result.budget:
        head += f", the earliest from {min(used) / result.budget:.0%} of it"
    result.notes.insert(0, head + ".")
    if not result.held_out:
        result.notes.append(
            "No point has a held-out value (eval.interval=0?): ranked by the training value, a weaker claim."
        )
    repeated = sorted({seed for group in result.groups for seed, points in group.seeds.items() if len(points) > 1})
    if repeated:
        result.notes.append(
            f"Runs that repeat a seed of their group ({', '.join(repeated)}) count once, by their mean."
        )
    if any(len(group.values) == 1 for group in result.groups) and len(result.groups) > 1:
        result.notes.append("Groups of one seed have no interval, and nothing says that their differences are real.")


def _notes_on_code(points: list[Point]) -> list[str]:
    """Where points ran with different code of prl; of the user's own is a column."""
    names: dict[str, list[str]] = {}
    for point in points:
        if point.code:
            names.setdefault(point.code, []).append(point.name)
    listed = "; ".join(f"{version}: {some_names(found)}" for version, found in names.items())
    return [f"Not all ran the same code of prl: {listed}."] if len(names) > 1 else []


def format_budget(axis: Axis, budget: float) -> str:
    return f"{budget:.4g}" if axis == "gpu_hours" else f"{budget:,.0f}"
