"""Which keys tell the points apart. Only these are columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prl.compare.points import Point
from prl.config.console import one_line
from prl.config.point import NOT_IDENTITY

ABSENT = "-"
SEED = "seed"
SECOND_NAMES = {"memory": "memory_recipe"}


def swept_columns(points: list[Point]) -> list[str]:
    """The swept keys of all points in the order given, seed last.

    Where no point says what was swept: group choices and then single keys, each only if it separates points that those
    before it do not.
    """
    keys = list(dict.fromkeys(key for point in points for key in point.swept))
    known = [point for point in points if point.config]
    if not keys and len(known) > 1:
        keys = _differing(known)
    return [*(key for key in keys if key != SEED), *(key for key in keys if key == SEED)]


def value_of(point: Point, key: str) -> str:
    """The point's value of a column, from what was swept or from its config."""
    if key in point.swept:
        return point.swept[key]
    choice = point.config.get("choices", {}).get(SECOND_NAMES.get(key, key))
    if choice is not None:
        return one_line(choice)
    node: Any = point.config
    for part in key.lstrip("+").split("."):
        node = node.get(part) if isinstance(node, dict) else None
    return ABSENT if node is None or isinstance(node, dict) else _plain(node)


def _differing(points: list[Point]) -> list[str]:
    columns: list[str] = []
    classes: list[tuple[str, ...]] = [()] * len(points)
    for key, read in _candidates(points):
        values = [read(point) for point in points]
        refined = [(*known, value) for known, value in zip(classes, values, strict=True)]
        if len(set(refined)) > len(set(classes)):
            columns.append(key)
            classes = refined
    return columns


def _candidates(points: list[Point]) -> Iterator[tuple[str, Callable[[Point], str]]]:
    """Seed first, which no choice stands for; choices before keys: `memory` says more than a chunk size."""
    choices = sorted({group for point in points for group in point.config.get("choices", {}) if group.isprintable()})
    keys = sorted({key for point in points for key in _flat(point.config) if key.isprintable()})
    for key in (SEED, *choices, *keys):
        if key == SEED or key in choices or key.split(".")[0] not in (*NOT_IDENTITY, SEED, *SECOND_NAMES):
            yield key, lambda point, key=key: value_of(point, key)  # type: ignore[misc]


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
