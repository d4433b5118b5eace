"""The points of a sweep, each with its plan and its directory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from launch.settings import LauncherSettings
from launch.states import PointState
from prl.config.errors import ConfigError, UserError
from prl.planning.planner import make_plan
from prl.planning.run_plan import RunPlan
from prl.runtime.directory.files import move_away, replace_file
from prl.runtime.directory.rundir import claim, refuse_foreign

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


@dataclass(frozen=True)
class Point:
    """One point with its plan. `overrides` are those that Hydra would give to this job."""

    overrides: tuple[str, ...]
    plan: RunPlan

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def path(self) -> Path:
        assert self.config.output_dir is not None
        return Path(self.config.output_dir)


def make_points(overrides: Iterable[tuple[str, ...]], configs: Iterable[RunConfig]) -> list[Point]:
    """Points with their plans. Raises ConfigError when two are the same, or a directory holds something else."""
    points = [Point(lines, make_plan(config)) for lines, config in zip(overrides, configs, strict=True)]
    found: list[UserError] = []
    seen: dict[Path, Point] = {}
    for point in points:
        if point.path in seen:
            found.append(
                UserError(
                    "Two points of the sweep are the same.",
                    where=" ".join(point.overrides),
                    why=f"it computes what {' '.join(seen[point.path].overrides)} computes",
                    fix="leave one of them out",
                )
            )
        seen[point.path] = point
        try:
            refuse_foreign(point.path, point.plan)
        except UserError as error:  # its remedy is of a run alone
            fix = f"hydra.sweep.dir=ANOTHER_DIRECTORY, or {move_away(point.path, 'other')}"
            found.append(UserError(error.what, where=f"hydra.sweep.dir={point.path.parent}", why=error.why, fix=fix))
    if found:
        raise ConfigError(found)
    return points


def freeze(point: Point) -> None:
    """Make the point's directory and write its plan there; what is there already stays."""
    run_dir = claim(point.plan)
    try:
        if run_dir.fresh:
            replace_file(point.path / "overrides.txt", "".join(f"{line}\n" for line in point.overrides))
    finally:
        run_dir.release()


def is_to_start(state: PointState, settings: LauncherSettings) -> bool:
    return state in ("missing", "unfinished", "refused") or (state == "failed" and settings.retry_failed)
