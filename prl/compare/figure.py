"""Curves over a budget: seeds as thin lines, the mean of each group as a thick one; as PNG and as SVG for the page."""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from html import escape

from prl.compare.curves import AXES, Axis, Curves
from prl.compare.ranking import Comparison, Group

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#8c564b", "#7f7f7f")  # after Okabe and Ito
DASHES = ((), (6, 3), (2, 2), (8, 3, 2, 3))  # a second, third and fourth round of the colours
MAX_VERTICES = 400  # of a line; more are not seen
WIDTH, HEIGHT = 1000, 380
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 14, 46

Line = list[tuple[float, float]]


@dataclass(frozen=True)
class Curve:
    """A group's lines. `index` chooses its colour and dashes."""

    label: str
    index: int
    seeds: list[Line]
    mean: Line

    @property
    def color(self) -> str:
        return COLORS[self.index % len(COLORS)]

    @property
    def dashes(self) -> tuple[int, ...]:
        return DASHES[self.index // len(COLORS) % len(DASHES)]


def make_curves_of_groups(comparison: Comparison, axis: Axis) -> list[Curve]:
    """The lines of all groups that have any, best first. The mean is that of the ranked points, if any is."""
    found = []
    for index, group in enumerate(comparison.groups):
        lines = {
            point.name: _line(point.curves, axis, comparison.held_out)
            for point in group.points
            if point.curves and point.curves.series(comparison.held_out)
            if axis == "steps" or point.curves.reached(axis)
        }
        counted = [line for name, line in lines.items() if name in comparison.ranked] or [*lines.values()]
        if lines:
            found.append(Curve(label_of(comparison, group), index, [*lines.values()], mean_line(counted)))
    return found


def label_of(comparison: Comparison, group: Group) -> str:
    pairs = zip(comparison.group_columns, group.key, strict=True)
    return " ".join(f"{key.rsplit('.', 1)[-1]}={value}" for key, value in pairs) or comparison.title


def _line(curves: Curves, axis: Axis, held_out: bool) -> Line:
    series = curves.series(held_out)
    stride = math.ceil(len(series) / MAX_VERTICES)
    return [(curves.cost(axis, step), value) for step, value in [*series[:-1:stride], series[-1]]]


def mean_line(lines: list[Line]) -> Line:
    """The mean where all lines have begun and none has ended; of each, its last value at or before."""
    begin, end = max(line[0][0] for line in lines), min(line[-1][0] for line in lines)
    grid = sorted({x for line in lines for x, _ in line if begin <= x <= end})
    at = [0] * len(lines)
    mean = []
    for x in grid:
        for i, line in enumerate(lines):
            while at[i] + 1 < len(line) and line[at[i] + 1][0] <= x:
                at[i] += 1
        mean.append((x, math.fsum(line[i][1] for line, i in zip(lines, at, strict=True)) / len(lines)))
    return mean


# --- PNG --------------------------------------------------------------------------------------------------------------


def draw_png(comparison: Comparison) -> bytes | None:
    """The curves over the chosen axis; None if there is nothing to draw."""
    curves = make_curves_of_groups(comparison, comparison.axis)
    if not curves or comparison.metric is None:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.add_subplot()
    for curve in curves:
        dashes = (0, curve.dashes) if curve.dashes else "-"
        for line in curve.seeds if len(curve.seeds) > 1 else []:
            axes.plot(*zip(*line, strict=True), color=curve.color, linestyle=dashes, linewidth=0.7, alpha=0.45)
        axes.plot(*zip(*curve.mean, strict=True), color=curve.color, linestyle=dashes, linewidth=2.2, label=curve.label)
    if comparison.budget is not None:
        axes.axvline(comparison.budget, color="0.5", linewidth=0.8, linestyle=":")
    axes.set_xlabel(AXES[comparison.axis])
    axes.set_ylabel(comparison.metric.label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False, ncols=1 + len(curves) // 9)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=130, format="png")
    return picture.getvalue()


# --- SVG --------------------------------------------------------------------------------------------------------------


def render_svg(comparison: Comparison, axis: Axis) -> str:
    """The same as SVG without fixed text colours; each group's lines are in a <g class="curve" data-group="INDEX">."""
    curves = make_curves_of_groups(comparison, axis)
    if not curves or comparison.metric is None:
        return ""
    every = [pair for curve in curves for line in curve.seeds for pair in line]
    frame = Frame.around(every)
    marker = comparison.budget if axis == comparison.axis else None
    label, middle = escape(comparison.metric.label), (LEFT + WIDTH - RIGHT) / 2
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label} over {AXES[axis]}">',
        *frame.grid(),
        *(frame.marker(marker) if marker is not None else []),
        *(_curve_svg(curve, frame) for curve in curves),
        f'<text class="title" x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">{AXES[axis]}</text>',
        f'<text class="title" transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" '
        f'text-anchor="middle">{label}</text>',
        "</svg>",
    ]
    return "\n".join(parts)


@dataclass(frozen=True)
class Frame:
    """Data coordinates to pixels."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    @classmethod
    def around(cls, pairs: Line) -> Frame:
        xs, ys = [x for x, _ in pairs], [y for _, y in pairs]
        margin = 0.04 * (max(ys) - min(ys)) or 0.05 * abs(ys[0]) or 0.05
        return cls(min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1, min(ys) - margin, max(ys) + margin)

    def x(self, value: float) -> float:
        return LEFT + (value - self.low_x) / (self.high_x - self.low_x) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low_y) / (self.high_y - self.low_y) * (HEIGHT - TOP - BOTTOM)

    def path(self, line: Line) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in line)

    def grid(self) -> list[str]:
        parts = []
        for tick in ticks(self.low_y, self.high_y):
            y = f"{self.y(tick):.1f}"
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
            parts.append(f'<text x="{LEFT - 8}" y="{y}" dy="4" text-anchor="end">{tick:g}</text>')
        for tick in ticks(self.low_x, self.high_x):
            x = f"{self.x(tick):.1f}"
            parts.append(f'<line class="tick" x1="{x}" x2="{x}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM + 4}"/>')
            parts.append(f'<text x="{x}" y="{HEIGHT - BOTTOM + 17}" text-anchor="middle">{short(tick)}</text>')
        bottom = HEIGHT - BOTTOM
        return [*parts, f'<line class="tick" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>']

    def marker(self, budget: float) -> list[str]:
        x = f"{self.x(budget):.1f}"
        line = f'<line class="budget" x1="{x}" x2="{x}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
        return [line + "<title>compared here</title></line>"]


def _curve_svg(curve: Curve, frame: Frame) -> str:
    dashes = f' stroke-dasharray="{" ".join(map(str, curve.dashes))}"' if curve.dashes else ""
    thin = [f'<path class="seed" d="{frame.path(line)}"/>' for line in curve.seeds if len(curve.seeds) > 1]
    x, y = curve.mean[-1]
    return (
        f'<g class="curve" data-group="{curve.index}" stroke="{curve.color}" fill="none"{dashes}>'
        f"<title>{escape(curve.label)}</title>{''.join(thin)}"
        f'<path class="mean" d="{frame.path(curve.mean)}"/>'
        f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{curve.color}" stroke="none"/></g>'
    )


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round numbers within the range, about as many as wanted."""
    raw = (high - low) / wanted
    power = 10 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [round(i * step, 12) for i in range(first, math.floor(high / step) + 1)]


def short(value: float) -> str:
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:g}"
