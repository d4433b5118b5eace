"""sweep.json: the record of a sweep as a whole: its commands, its points, and the jobs that they were submitted as."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.code_copy import FrozenCode
from launch.points import Point
from prl.config.console import one_line
from prl.runtime.directory.files import change_object, damaged, read_object, read_object_or_default

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

SWEEP_FILE = "sweep.json"


def read_sweep(sweep_dir: Path) -> dict[str, Any]:
    """sweep.json, or an empty record of the same form. Raises UserError if it is damaged."""
    sweep = read_object_or_default(sweep_dir / SWEEP_FILE, {})
    _complete(sweep, sweep_dir)
    return sweep


def name_in(sweep_dir: Path, path: Path) -> str:
    """What the sweep's record calls a point: where it lies below the sweep; "." for a job alone."""
    return path.relative_to(sweep_dir).as_posix()


def record_points(sweep_dir: Path, points: Iterable[Point]) -> None:
    """Add points (and the command that named them) to the sweep's record."""

    def add(sweep: dict[str, Any]) -> None:
        _complete(sweep, sweep_dir)
        known = {point["dir"] for point in sweep["points"]}
        ids = {point.plan.point_id: name_in(sweep_dir, point.path) for point in points}
        # a point that somebody has moved or removed, and that is, or will be, somewhere else now
        gone = [row for row in sweep["points"] if ids.get(row.get("point_id"), row["dir"]) != row["dir"]]
        gone = [row for row in gone if not (sweep_dir / row["dir"]).exists()]
        sweep["points"] = [row for row in sweep["points"] if row not in gone]
        for point in points:
            name = name_in(sweep_dir, point.path)
            if name not in known:
                sweep["points"].append({"dir": name, "point_id": point.plan.point_id, "swept": point.config.swept})
        sweep["commands"].append({"time": time.time(), "argv": sys.argv})

    change_object(sweep_dir / SWEEP_FILE, add, {})


def submission(sweep_dir: Path, script: Path, points: list[Point], is_array: bool, code: FrozenCode) -> dict[str, Any]:
    """The row of a job, whose element i is points[i], but for its id."""
    return {
        "time": time.time(),
        "script": script.name,
        "is_array": is_array,
        "points": [name_in(sweep_dir, point.path) for point in points],
        "code": code.path.name,
        "modules": code.modules,
    }


def record_job(sweep_dir: Path, row: dict[str, Any]) -> None:
    """Add a `submission` with its job_id."""

    def add(sweep: dict[str, Any]) -> None:
        _complete(sweep, sweep_dir)
        sweep["submissions"].append(row)

    change_object(sweep_dir / SWEEP_FILE, add, {})


def record_refusal(sweep_dir: Path, points: list[Point], why: str) -> None:
    """Of a job that sbatch did not take."""
    row = {"time": time.time(), "points": [name_in(sweep_dir, point.path) for point in points], "why": why}

    def add(sweep: dict[str, Any]) -> None:
        _complete(sweep, sweep_dir)
        sweep.setdefault("refusals", []).append(row)

    change_object(sweep_dir / SWEEP_FILE, add, {})


def refused_points(sweep: dict[str, Any]) -> dict[str, str]:
    """Points whose last submission was refused, and why."""
    rows = sweep.get("refusals", [])
    found: dict[str, str] = {}
    for row in rows if _all_have(rows, {"time": float, "points": list, "why": str}) else []:
        later = [job for job in sweep["submissions"] if job.get("time", 0.0) > row["time"]]
        taken = {name for job in later for name in job["points"]}
        found |= {name: row["why"] for name in row["points"] if name not in taken}
    return found


def where_they_are(configs: Sequence[RunConfig], sweep_dir: Path) -> list[RunConfig]:
    """Points of a sweep with the directories in which the sweep has them already, if it has. Says so."""
    placed, places, renamed = list(configs), places_of_ids(sweep_dir), []
    for index, config in enumerate(placed):
        name = Path(str(config.output_dir)).name
        if (sweep_dir / name).is_dir():
            continue
        old = sweep_dir / places.get(name.rpartition("-")[2], name)  # a label ends with its point's id
        if old.name != name:
            renamed.append(f"{name} is {old.name}")
            placed[index] = config.model_copy(update={"output_dir": str(old)})
    if renamed:
        told = f"{len(renamed)} of these points are in the sweep already, under other names: {renamed[0]}"
        print(one_line(told + ", and so on" * (len(renamed) > 1)), file=sys.stderr, flush=True)
    return placed


def places_of_ids(sweep_dir: Path) -> dict[str, str]:
    """Where the sweep has each point, by its id: the directory's name also tells the axes of the command that was first
    to name it, or is what somebody has called it since. Raises UserError if the record is damaged.
    """
    found: dict[str, str] = {}
    rows = read_sweep(sweep_dir)["points"]
    for row in rows:
        if isinstance(point_id := row.get("point_id"), str) and (sweep_dir / row["dir"]).is_dir():
            found.setdefault(point_id, row["dir"])
    recorded = {row["dir"] for row in rows}
    for plan in sorted(sweep_dir.glob("*/plan.json")):
        if plan.parent.name not in recorded and (told := read_object(plan)) is not None:
            found.setdefault(str(told.get("point_id")), plan.parent.name)
    return found


def _complete(sweep: dict[str, Any], sweep_dir: Path) -> None:
    """Add what a record lacks. Raises UserError if what it has is something else."""
    for key, value in {"name": sweep_dir.name, "commands": [], "points": [], "submissions": []}.items():
        sweep.setdefault(key, value)
    if not isinstance(sweep["commands"], list):
        raise damaged(sweep_dir / SWEEP_FILE, "its commands are no list")
    if not _all_have(sweep["points"], {"dir": str}):
        raise damaged(sweep_dir / SWEEP_FILE, "its points are no list of objects that name a directory each")
    if not _all_have(sweep["submissions"], {"job_id": str, "is_array": bool, "points": list}):
        raise damaged(sweep_dir / SWEEP_FILE, "its submissions are no list of objects that name a job and its points")


def _all_have(rows: Any, types: dict[str, type]) -> bool:
    return isinstance(rows, list) and all(
        isinstance(row, dict) and all(isinstance(row.get(key), kind) for key, kind in types.items()) for row in rows
    )


def job_of_points(sweep: dict[str, Any]) -> dict[str, str]:
    """Point directory -> the job that it was last submitted as, as squeue names it (`123_4`, or `123`)."""
    return {
        name: f"{job['job_id']}_{index}" if job["is_array"] else job["job_id"]
        for job in sweep["submissions"]
        for index, name in enumerate(job["points"])
    }
