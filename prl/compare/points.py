"""Points as they lie in run directories, whatever state they are in."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.compare.curves import ROLES, Curves, make_curves
from prl.compare.hours import PaidHours, read_paid_hours
from prl.config.console import one_line
from prl.config.errors import UTF8, UserError, is_unread
from prl.metrics.reader import read_rows
from prl.runtime.directory.files import find_directories, read_object
from prl.runtime.directory.inputs import hashes_in
from prl.runtime.directory.rundir import ENV
from prl.runtime.directory.shapes import is_number, shaped, texts
from prl.runtime.directory.status_file import read_status
from prl.runtime.people.faults import PLAN, find_faults, holds_run
from prl.status import ask_record, state_alone, state_of_point

SWEEP_FILE = "sweep.json"
OF_PLAN: dict[str, Any] = {
    "point_id": "",
    "config": {"job": "", "choices": {}, "swept": {}},
    "roles": [{"node": 0, "devices": [0]}],
}


@dataclass
class Point:
    """One point of a sweep.

    `state` is what `prl.status` says of it (`prl.status.state_of_point`).
    `devices` counts those of trainer and engines.
    """

    name: str
    state: str
    why: str = ""
    point_id: str = ""
    job: str = ""
    step: int = 0
    max_steps: int | None = None
    devices: int | None = None
    swept: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    curves: Curves | None = None
    hours: PaidHours | None = None
    run_id: str = ""  # of the run directory, and of wandb's copy of it
    directory: Path | None = None  # in which the run's own lies; None of wandb's copy
    modules: str = (
        ""  # short hash of the user's own, as of the last attempt; "" if there are none, or nobody has kept it
    )
    code: str = ""  # of prl's

    @property
    def figures(self) -> dict[str, float]:
        """Of its curves, and what it has cost."""
        return (self.curves.figures if self.curves else {}) | (self.hours.figures() if self.hours else {})

    @property
    def is_done(self) -> bool:
        return self.state == "done"


def read_directory(target: Path, silent: Mapping[str, tuple[str, str]] | None = None) -> list[Point]:
    """The points of a sweep directory in the order of its sweep.json, or of a single run.

    Args:
        silent: what the sweep's record and SLURM's queue say of points, as of `prl.status.ask_record`; None asks them.

    Raises UserError if there is none.
    """
    if holds_run(target):
        return [read_point(target, target.name, known=state_alone(target))]
    silent = ask_record(target)[0] if silent is None else silent
    listed = _listed_points(target)
    paths = {os.path.realpath(path) for path, _ in listed}
    found = [path for path in find_runs(target) if os.path.realpath(path) not in paths]
    named = [(path, _name(path, target), entry) for path, entry in [*listed, *((path, None) for path in found)]]
    points = [read_point(path, name, entry, state_of_point(path, name, silent)) for path, name, entry in named]
    if not points:
        raise UserError(
            f"there is no run in {target}",
            where=str(target),
            why="this locale does not know the letters of its name"
            if is_unread(str(target))
            else "a run is a directory with a plan.json, at any depth",
            fix=UTF8 if is_unread(str(target)) else "name the directory of a sweep, say outputs/sweeps/NAME",
        )
    return points


def find_runs(directory: Path) -> list[Path]:
    """Directories with a plan or a status at any depth, not looking into them."""
    return find_directories(directory, holds_run)


def read_point(
    path: Path, name: str, listed: dict[str, Any] | None = None, known: tuple[str, str] | None = None
) -> Point:
    """One run directory, which may lack anything.

    Args:
        known: its state, and what its sweep's record and SLURM's queue say of it; None of a run by itself.
        listed: its entry in sweep.json.
    """
    listed = listed or {}
    found, faults = _read_json(path / PLAN), find_faults(path)
    plan, kept = shaped(found, OF_PLAN), _read_json(path / ENV)
    config, roles = plan["config"] if "config" in found else {}, plan["roles"]
    swept = texts(config.get("swept")) or texts(listed.get("swept"))
    status = read_status(path)
    failure = status.get("failure") or {}
    state, why = known or state_of_point(path, name, {})
    told = [why] if why else []
    told += [f"{failure['class']}: {failure['role']}: {failure['message']}"] if failure else []
    point = Point(
        name=one_line(name),
        state=state,
        why=one_line("; ".join(dict.fromkeys([*told, *faults]))),
        point_id=one_line(plan["point_id"] or listed.get("point_id", "")),
        job=config.get("job", ""),
        step=status.get("step", 0),
        max_steps=steps if is_number(steps := config.get("max_steps")) else None,
        devices=len({(role["node"], device) for role in roles for device in role["devices"]}) or None,
        swept={one_line(key): one_line(value) for key, value in swept.items()},
        config=config,
        run_id=str(kept.get("run_id", "")),
        directory=path.parent,
        modules=_short_hash(hashes_in(kept, "modules")),
        code=_short_hash(hashes_in(kept, "code")),
    )
    point.hours = read_paid_hours(path, point.devices, point.state)
    rows = {role: read_rows(path, role) for role in ROLES}
    if any(rows.values()):
        point.curves = make_curves(point.job, rows, point.devices)
        point.step = max(point.step, point.curves.steps[-1])
    return point


def _listed_points(target: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Path and entry of each point in sweep.json; a relative `dir` is one below the sweep's."""
    found = _read_json(target / SWEEP_FILE).get("points")
    entries = [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
    names = [(entry.get("dir"), entry) for entry in entries]
    return [(target / name, entry) for name, entry in names if isinstance(name, str) and _is_a_name(name)]


def _is_a_name(name: str) -> bool:
    """Whether a file system might have it."""
    try:
        return b"\0" not in os.fsencode(name)
    except UnicodeEncodeError:
        return False


def _name(path: Path, target: Path) -> str:
    return str(path.relative_to(target)) if path.is_relative_to(target) else str(path)


def _short_hash(hashes: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()[:8] if hashes else ""


def _read_json(path: Path) -> dict[str, Any]:
    return read_object(path) or {}
