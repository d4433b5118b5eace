"""The points of a sweep: where each lies, what state it is in, and the record of the sweep as a whole (sweep.json)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from prl.config.errors import ConfigError, UserError
from prl.planning.planner import make_plan
from prl.planning.run_plan import RunPlan
from prl.runtime.directory.files import change_object, damaged, is_held, read_object_or_default, replace_file
from prl.runtime.directory.rundir import claim, is_locked, refuse_foreign
from prl.runtime.directory.status_file import read_status
from prl.runtime.process.failures import MENDED_BY_PEOPLE

if TYPE_CHECKING:
    from launch.code_copy import FrozenCode
    from launch.session import Session
    from launch.settings import LauncherSettings
    from prl.config.schema import RunConfig

SWEEP_FILE = "sweep.json"
TAKEN = ".taken"  # in the sweep's directory: a locked file for each point that a sweep on this machine has in hand
TAKE_WAIT_S = 0.5  # for those who only look whether a point is taken
PointState = Literal["missing", "active", "unfinished", "failed", "done"]


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
            fix = f"hydra.sweep.dir=ANOTHER_DIRECTORY, or mv {point.path} {point.path}.other"
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


def state_of(path: Path, queued: Iterable[Path] = ()) -> PointState:
    """What a point needs: nothing (done; active: it runs or is queued), a first start, to go on, or a person."""
    return "active" if path in queued or is_taken(path) else state_in(path)


def state_in(path: Path) -> PointState:
    """As `state_of`, by what lies in its directory alone."""
    if is_locked(path):
        return "active"
    status = read_status(path)
    if not status:
        return "missing"
    if status["state"] == "done":
        return "done"
    kind = (status.get("failure") or {}).get("class")
    return "failed" if status["state"] == "failed" and kind in MENDED_BY_PEOPLE else "unfinished"


def is_to_start(state: PointState, settings: LauncherSettings) -> bool:
    return state in ("missing", "unfinished") or (state == "failed" and settings.retry_failed)


def leave(session: Session, point: Point, state: PointState) -> None:
    """Say why a point is not started; one that has failed counts as failed for this sweep, too."""
    reasons = {
        "done": "done already",
        "active": "running or queued already",
        "failed": "failed before, and would again; hydra.launcher.retry_failed=true tries",
    }
    print(f"{point.path.name}: {reasons[state]}", file=sys.stderr, flush=True)
    if state == "failed":
        session.failed[str(point.path)] = 1


# --- points in the hands of a sweep on this machine -------------------------------------------------------------------


def take(path: Path) -> int | None:
    """Take a point, so that no other sweep starts it. Returns a descriptor, to be closed when it has ended; None if
    another has it. Raises OSError.
    """
    file = _taken_file(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + TAKE_WAIT_S
    while not _try_lock(fd):
        if time.monotonic() > deadline:
            os.close(fd)
            return None
        time.sleep(0.02)
    return fd


@contextlib.contextmanager
def taken(path: Path) -> Iterator[bool]:
    """Whether we could take it; if so, it is ours meanwhile."""
    fd = take(path)
    try:
        yield fd is not None
    finally:
        if fd is not None:
            os.close(fd)


def is_taken(path: Path) -> bool:
    return is_held(_taken_file(path))


def _taken_file(path: Path) -> Path:
    return path.parent / TAKEN / path.name


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks: the run directory's own decides
        return True
    return True


# --- sweep.json -------------------------------------------------------------------------------------------------------


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
        for point in points:
            name = name_in(sweep_dir, point.path)
            if name not in known:
                sweep["points"].append({"dir": name, "point_id": point.plan.point_id, "swept": point.config.swept})
        sweep["commands"].append({"time": time.time(), "argv": sys.argv})

    change_object(sweep_dir / SWEEP_FILE, add, {})


def record_submission(
    sweep_dir: Path, job_id: str, script: Path, points: list[Point], is_array: bool, code: FrozenCode
) -> None:
    """Add a job, whose element i is points[i]."""
    row = {
        "job_id": job_id,
        "time": time.time(),
        "script": script.name,
        "is_array": is_array,
        "points": [name_in(sweep_dir, point.path) for point in points],
        "code": code.path.name,
        "modules": code.modules,
    }

    def add(sweep: dict[str, Any]) -> None:
        _complete(sweep, sweep_dir)
        sweep["submissions"].append(row)

    change_object(sweep_dir / SWEEP_FILE, add, {})


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
