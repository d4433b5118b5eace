"""status.json: what a run is doing, for other programs. Always a whole file, replaced by rename."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, Literal

State = Literal["starting", "running", "stopping", "done", "stopped", "failed"]
FINAL_STATES = ("done", "stopped", "failed")
REWRITE_INTERVAL_S = 1.0


def status_path(run_dir: Path) -> Path:
    return run_dir / "status.json"


def read_status(run_dir: Path) -> dict[str, Any]:
    """The status, or {} if there is none (yet)."""
    try:
        return json.loads(status_path(run_dir).read_text())
    except (OSError, ValueError):
        return {}


class StatusFile:
    """The one writer of a run's status. A full disk costs updates, never the run."""

    def __init__(self, run_dir: Path, point_id: str, job: str, name: str, max_steps: int) -> None:
        self.path = status_path(run_dir)
        self.written_s = 0.0
        attempt = read_status(run_dir).get("attempt", 0) + 1
        self.content: dict[str, Any] = {
            "state": "starting",
            "began": False,  # whether all roles were ever ready
            "failure": None,
            "step": 0,
            "max_steps": max_steps,
            "roles": {},
            "started": time.time(),
            "updated": time.time(),
            "attempt": attempt,
            "point_id": point_id,
            "job": job,
            "name": name,
            "root_pid": os.getpid(),
        }
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
        self.content["updated"] = time.time()
        self.written_s = time.monotonic()
        partial = self.path.with_suffix(".json.partial")
        with contextlib.suppress(OSError):
            partial.write_text(json.dumps(self.content, indent=1) + "\n")
            os.replace(partial, self.path)
