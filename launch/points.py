"""The points of a sweep: where each lies, what state it is in, and the record of the sweep as a whole (sweep.json)."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prl.config.errors import ConfigError, UserError
from prl.planning.run_plan import RunPlan, make_plan
from prl.runtime.rundir import claim, is_locked, refuse_foreign
from prl.runtime.status_file import read_status

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

SWEEP_FILE = "sweep.json"
PointState = Literal["missing", "active", "unfinished", "failed", "done"]
MENDED_BY_PEOPLE = ("oom", "config", "env", "code")  # classes of failure that would come again


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
        except UserError as error:
            found.append(error)
    if found:
        raise ConfigError(found)
    return points


def freeze(point: Point) -> None:
    """Make the point's directory and write its plan there; what is there already stays."""
    run_dir = claim(point.plan)
    try:
        if run_dir.fresh:
            (point.path / "overrides.txt").write_text("".join(f"{line}\n" for line in point.overrides))
    finally:
        run_dir.release()


def state_of(path: Path, queued: Iterable[Path] = ()) -> PointState:
    """What a point needs: nothing (done; active: it runs or is queued), a first start, to go on, or a person."""
    if path in queued or is_locked(path):
        return "active"
    status = read_status(path)
    if not status:
        return "missing"
    if status["state"] == "done":
        return "done"
    kind = (status.get("failure") or {}).get("class")
    return "failed" if status["state"] == "failed" and kind in MENDED_BY_PEOPLE else "unfinished"


# --- sweep.json -------------------------------------------------------------------------------------------------------


def read_sweep(sweep_dir: Path) -> dict[str, Any]:
    """sweep.json, or an empty record of the same form."""
    try:
        return json.loads((sweep_dir / SWEEP_FILE).read_text())
    except FileNotFoundError:
        return {"name": sweep_dir.name, "commands": [], "points": [], "submissions": []}


def record_points(sweep_dir: Path, points: Iterable[Point]) -> None:
    """Add points (and the command that named them) to the sweep's record."""
    sweep = read_sweep(sweep_dir)
    known = {point["dir"] for point in sweep["points"]}
    for point in points:
        if point.path.name not in known:
            entry = {"dir": point.path.name, "point_id": point.plan.point_id, "swept": point.config.swept}
            sweep["points"].append(entry)
    sweep["commands"].append({"time": time.time(), "argv": sys.argv})
    write_sweep(sweep_dir, sweep)


def record_submission(sweep_dir: Path, job_id: str, script: Path, points: list[Point], is_array: bool) -> None:
    """Add a job, whose element i is points[i]."""
    sweep = read_sweep(sweep_dir)
    sweep["submissions"].append(
        {
            "job_id": job_id,
            "time": time.time(),
            "script": script.name,
            "is_array": is_array,
            "points": [point.path.name for point in points],
        }
    )
    write_sweep(sweep_dir, sweep)


def write_sweep(sweep_dir: Path, sweep: dict[str, Any]) -> None:
    sweep_dir.mkdir(parents=True, exist_ok=True)
    partial = sweep_dir / f"{SWEEP_FILE}.partial"
    partial.write_text(json.dumps(sweep, indent=1) + "\n")
    os.replace(partial, sweep_dir / SWEEP_FILE)


def job_of_points(sweep: dict[str, Any]) -> dict[str, str]:
    """Point directory -> the job that it was last submitted as, as squeue names it (`123_4`, or `123`)."""
    return {
        name: f"{job['job_id']}_{index}" if job["is_array"] else job["job_id"]
        for job in sweep["submissions"]
        for index, name in enumerate(job["points"])
    }
