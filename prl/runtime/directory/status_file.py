"""status.json: what a run is doing, for other programs. Always a whole file, replaced by rename."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

from prl.runtime.directory.files import read_object, read_objects, replace_file
from prl.runtime.directory.identity import describe_process
from prl.runtime.directory.shapes import shaped, texts, without_misfits

State = Literal["starting", "running", "stopping", "done", "stopped", "failed"]
FINAL_STATES = ("done", "stopped", "failed")
REWRITE_INTERVAL_S = 1.0
RESERVE_BYTES = 1 << 16  # held back on the disk, so that a run that fails of a full one can say so
ATTEMPTS = "attempts.jsonl"  # in the run directory: one row for the start of each attempt by an agent, one for its end
EMPTY: dict[str, Any] = {
    "began": False,  # whether all roles were ever ready
    "failure": None,
    "doing": "",  # before its roles start: what it makes that several runs share, or waits for
    "step": 0,
    "max_steps": 0,
    "roles": {},
    "alarms": [],  # prl/metrics/alarms.py; those that are on
    "lost_engines": {},  # URL of one of inference.urls that is left out -> why
    "urls": [],  # of a server for people
    "started_by": "",  # who started its roles: "hand" or "torchrun", or the run itself
    "updated": 0.0,
    "attempt": 0,
    "point_id": "",
    "job": "",
    "name": "",
}
ROLE: dict[str, Any] = {"pid": 0, "state": "", "exit": None, "restarts": 0}
ALARM: dict[str, Any] = {"kind": "", "since": 0, "message": ""}
FAILURE: dict[str, Any] = {"class": "", "role": "", "rank": 0, "node": 0, "message": "", "log": "", "log_tail": [""]}
SHAPE = EMPTY | {"alarms": [ALARM], "urls": [""], "saved": None, "root": {}}  # `failure` and `roles` beside it
OF_ATTEMPTS: dict[str, Any] = {
    **{"node": "", "warned": "", "started": 0.0, "ended": 0.0},
    **{"exit_code": None, "step": 0, "saved": None},
}


def status_path(run_dir: Path) -> Path:
    return run_dir / "status.json"


def read_status(run_dir: Path) -> dict[str, Any]:
    """The status; {} if there is none (yet), or none that can be read. Keys that it lacks, and those whose values have
    the wrong type, have their first values.
    """
    return shape_status(read_object(status_path(run_dir)) or {})


def shape_status(found: dict[str, Any]) -> dict[str, Any]:
    """The same, of what a status.json says."""
    if found.get("state") not in get_args(State):
        return {}
    failure, roles = found.get("failure"), found.get("roles")
    status: dict[str, Any] = shaped(found, SHAPE)
    status["failure"] = shaped(failure, FAILURE) if isinstance(failure, dict) else None
    named = roles.items() if isinstance(roles, dict) else ()
    status["lost_engines"] = texts(found.get("lost_engines"))
    status["roles"] = {name: shaped(role, ROLE) for name, role in named if isinstance(role, dict)}
    return status


def misfits_of_status(found: dict[str, Any]) -> list[str]:
    """Keys of what a status.json says whose values have a type that no run writes."""
    likes = {key: like for key, like in SHAPE.items() if key != "failure"}
    return sorted(found.keys() & likes.keys() - without_misfits(found, likes).keys())


def _attempts_before(run_dir: Path) -> int:
    """By the status that the last one has left."""
    number: int = read_status(run_dir).get("attempt", 0)
    return number


def _attempts_begun(run_dir: Path) -> int:
    """By what agents have told, this one's too; 0 without agents. A damaged status does not know any."""
    numbers = [row.get("attempt") for row in read_objects(run_dir / ATTEMPTS)]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def read_attempts(path: Path) -> list[dict[str, Any]]:
    """One row for each attempt so far. One that never told its end was killed with its node: class node."""
    attempts: dict[int, dict[str, Any]] = {}
    for row in read_objects(path / ATTEMPTS):
        if isinstance(row.get("attempt"), int):
            attempts.setdefault(row["attempt"], {"class": "node"}).update(without_misfits(row, OF_ATTEMPTS))
    return [attempts[number] for number in sorted(attempts)]


class StatusFile:
    """The one writer of a run's status. A full disk costs updates, never the run, nor the word how it ended."""

    def __init__(
        self,
        run_dir: Path,
        point_id: str,
        job: str,
        name: str,
        max_steps: int,
        is_ours: Callable[[], bool] = lambda: True,
    ) -> None:
        """`is_ours`: whether the directory has not been given to another run; nothing is written into that one."""
        self.is_ours = is_ours
        self.path = status_path(run_dir)
        self.reserve = self.path.with_name(".status.reserve")
        self.written_s = 0.0
        self.content: dict[str, Any] = {
            **EMPTY,
            "state": "starting",
            "max_steps": max_steps,
            "started": time.time(),
            "updated": time.time(),
            "attempt": max(_attempts_before(run_dir) + 1, _attempts_begun(run_dir)),
            "point_id": point_id,
            "job": job,
            "name": name,
            "root_pid": os.getpid(),
            "root": describe_process(),
        }
        with contextlib.suppress(OSError):
            self.reserve.write_bytes(bytes(RESERVE_BYTES))
        self.write()

    @property
    def state(self) -> State:
        return self.content["state"]

    def update(self, **values: Any) -> None:
        """Change fields; written at once if the state changes, else every REWRITE_INTERVAL_S."""
        changes_state = values.get("state", self.state) != self.state
        self.content |= values
        if changes_state or time.monotonic() - self.written_s >= REWRITE_INTERVAL_S:
            self.write()

    def write(self) -> None:
        if not self.is_ours():
            return
        self.content["updated"] = time.time()
        self.written_s = time.monotonic()
        text, is_last = json.dumps(self.content, indent=1) + "\n", self.state in FINAL_STATES
        with contextlib.suppress(OSError):
            if is_last:
                self.reserve.unlink(missing_ok=True)
            replace_file(self.path, text, sync=is_last)
