"""Which runs of a sweep are one curve: those that `prl.compare` has for one group, which differ in their seed alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from prl.compare.columns import ABSENT, SEED, swept_columns, value_of
from prl.compare.points import OF_PLAN, Point
from prl.config.console import one_line
from prl.runtime.directory.files import read_object
from prl.runtime.directory.shapes import shaped, texts
from prl.runtime.people.faults import PLAN

ALONE = "all seeds"  # the curve where nothing but the seed differs


def groups_of(runs: Mapping[str, Path]) -> dict[str, tuple[str, str]]:
    """Run -> its curve, and its seed there. One whose seed is not known is taken for one of its own."""
    points = [_point(name, path) for name, path in runs.items()]
    columns = [column for column in swept_columns(points) if column != SEED]
    found = {}
    for point in points:
        seed = value_of(point, SEED)
        label = " ".join(f"{column}={value_of(point, column)}" for column in columns)
        found[point.name] = (label or ALONE, point.name if seed == ABSENT else seed)
    return found


def _point(name: str, path: Path) -> Point:
    plan = read_object(path / PLAN) or {}
    config = shaped(plan, OF_PLAN)["config"] if "config" in plan else {}
    swept = {one_line(key): one_line(value) for key, value in texts(config.get("swept")).items()}
    return Point(name, "", swept=swept, config=config)
