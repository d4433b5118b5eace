"""Which keys tell the points apart. Only these are columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prl.compare.points import Point
from prl.config.console import one_line
from prl.config.point import NOT_IDENTITY

ABSENT = "-"
VARIABLES = {
    "inference.api_key_var",
    "inference.control_key_var",
    "algo.teacher.api_key_var",
}  # names of variables, which change nothing
SEED = "seed"
MODULES = "modules"  # of the user's own: edited between two submissions, they make other runs of the same words
MOST_COLUMNS = 12  # with what was not swept; a note names the others
SECOND_NAMES = {"memory": "memory_recipe"}


def swept_columns(points: list[Point]) -> list[str]:
    """The keys that tell points apart: those that were swept, in the order given, what else differs, the seed last.

    Points that agree in all columns but the seed compute the same thing but for chance: they are one group. What was
    not swept is a column (group choices before single keys): within one sweep, whose other keys follow from those that
    were swept, if it separates points that those before it do not; of points from anywhere, if they differ in it.
    """
    keys = list(dict.fromkeys(key for point in points for key in point.swept))
    known = [point for point in points if point.config]
    columns = [key for key in keys if key != SEED]
    columns += _differing(known, columns)
    if len({point.modules for point in points if point.modules}) > 1 and _refines(known, columns, MODULES):
        columns.append(MODULES)
    if not _are_one_sweep(points):
        columns += _unexplained(known, columns)[: max(0, MOST_COLUMNS - len(columns))]
    seeds = {value_of(point, SEED) for point in known}
    return [*columns, *([SEED] if SEED in keys or len(seeds) > 1 else [])]


def value_of(point: Point, key: str) -> str:
    """The point's value of a column, from what was swept or from its config."""
    if key == MODULES:
        return point.modules or ABSENT
    if key in point.swept:
        return point.swept[key]
    choice = point.config.get("choices", {}).get(SECOND_NAMES.get(key, key))
    if choice is not None:
        return one_line(choice)
    node: Any = point.config
    for part in key.lstrip("+").split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return ABSENT if node is None or isinstance(node, dict) else _plain(node)


def _differing(points: list[Point], columns: list[str]) -> list[str]:
    """Further columns, where these leave points together that differ in more than the seed. A key that has the seed's
    value everywhere (`${seed}`) is the seed.
    """
    more: list[str] = []
    for key in _candidates(points):
        is_seed = all(value_of(point, key) == value_of(point, SEED) for point in points)
        if not is_seed and _refines(points, [*columns, *more], key):
            more.append(key)
    return more


def _refines(points: list[Point], columns: list[str], key: str) -> bool:
    """Whether a key tells points apart that these columns leave together."""
    classes = {tuple(value_of(point, column) for column in columns) for point in points}
    return len({tuple(value_of(point, column) for column in (*columns, key)) for point in points}) > len(classes)


def _are_one_sweep(points: list[Point]) -> bool:
    places = {(point.directory, frozenset(point.swept)) for point in points}
    return len(places) == 1 and points[0].directory is not None and bool(points[0].swept)


def _unexplained(points: list[Point], columns: list[str]) -> list[str]:
    """Keys in which points differ and that are no column: those whose value another choice of their group does not
    tell, be it a column or one of these.
    """
    named = {SECOND_NAMES.get(column, column): [value_of(point, column) for point in points] for column in columns}
    found: list[str] = []
    for key in _candidates(points):
        values = [value_of(point, key) for point in points]
        is_seed = all(value == value_of(point, SEED) for value, point in zip(values, points, strict=True))
        told = named.get(key.split(".")[0])
        if len(set(values)) < 2 or key in named or is_seed or (told is not None and _tells(told, values)):
            continue
        found.append(key)
        named[key] = values
    return found


def _tells(told: list[str], values: list[str]) -> bool:
    """Whether the second of each pair follows from the first."""
    return len(set(zip(told, values, strict=True))) == len(set(told))


def differing_behind(points: list[Point], columns: list[str]) -> list[str]:
    """Keys in which points differ and that are no column: there are too many, or (choices alone, within a sweep) the
    columns tell the points apart without them.
    """
    known = [point for point in points if point.config]
    further = _unexplained(known, columns)
    if not _are_one_sweep(points):
        return further
    return [key for key in further if key in known[0].config.get("choices", {})]


def _candidates(points: list[Point]) -> Iterator[str]:
    """Choices before keys: `memory` says more than a chunk size."""
    choices = sorted({group for point in points for group in point.config.get("choices", {}) if group.isprintable()})
    yield from choices
    for key in sorted({key for point in points for key in _flat(point.config) if key.isprintable()}):
        if (
            key not in choices
            and key.split(".")[0] not in (*NOT_IDENTITY, SEED, *SECOND_NAMES)
            and key not in VARIABLES
        ):
            yield key


def _flat(node: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "[" + ",".join(map(_plain, value)) + "]" if isinstance(value, list) else one_line(value)
