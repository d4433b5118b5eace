"""What in a run directory cannot be read: which file, and why. For all that show runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, get_args

from prl.config.branching import RECORD
from prl.metrics.writer import metrics_path
from prl.runtime.directory.files import open_regular, parse_object, read_object, why_no_object
from prl.runtime.directory.rundir import BEFORE_PLAN, is_locked
from prl.runtime.directory.status_file import State, misfits_of_status, shape_status, status_path

# states of a point that cannot tell them itself
UNREADABLE = "unreadable"  # its status cannot be read, or its plan before it has one, or any file of one that is done
NOT_STARTED = "not started"  # a frozen plan and nothing more
MISSING = "missing"  # a sweep's record names it, and nothing is there, or its job is gone without having started it
PLAN = "plan.json"
TAIL_BYTES = 20_000  # some rows of metrics
WRITERS = {"rl": ("orchestrator", "trainer/0"), "sft": ("trainer/0",)}  # job -> who writes a row in each step


def holds_run(path: Path) -> bool:
    """Whether a run has been here, in whatever state it has left the directory."""
    return any(os.path.lexists(path / name) for name in (PLAN, "status.json"))


def find_faults(run_dir: Path) -> list[str]:
    """A sentence for each file that cannot be read, or that is gone although others say that the run has begun; none
    for a directory that is not there, or holds nothing yet.
    """
    try:
        names = set(os.listdir(run_dir))
    except (FileNotFoundError, ValueError):  # a name with a zero byte, in a record that was damaged
        return []
    except OSError as error:
        return [f"{run_dir} cannot be read: {error.strerror}"]
    says = read_object(status_path(run_dir)) or {}
    status = shape_status(says)
    of_status = _of_values(run_dir, says) if status else _of_status(run_dir)
    found = [_of_plan(run_dir, names), of_status, *_of_metrics(run_dir, status)]
    return [fault for fault in found if fault]


def within(directory: Path, why: str) -> str:
    """The same with paths below the directory from there on, for tables: short, however long the directory's own."""
    return re.sub(rf"(?<![\w./~-]){re.escape(f'{directory}{os.sep}')}", "", why)


def last_lines(path: Path) -> list[str]:
    """Of a file, without reading all of it; the first one may be cut. Raises OSError."""
    with open_regular(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _of_plan(run_dir: Path, names: set[str]) -> str:
    if PLAN not in names:
        has_begun = any(not name.startswith(".") for name in names - BEFORE_PLAN)
        return f"{run_dir / PLAN} is missing, and other files of a run are there" if has_begun else ""
    return why_no_object(run_dir / PLAN, ("config",))


def _of_values(run_dir: Path, says: dict[str, Any]) -> str:
    misfits = ", ".join(misfits_of_status(says))
    return f"{status_path(run_dir)} was changed: no run writes such values of {misfits}" if misfits else ""


def _of_status(run_dir: Path) -> str:
    """Of one that says nothing."""
    path = status_path(run_dir)
    if os.path.lexists(path):
        return why_no_object(path) or f"{path} cannot be used: its state is none of {', '.join(get_args(State))}"
    if is_locked(run_dir):  # it may be about to be written
        return ""
    taken = (run_dir / RECORD).exists()  # from another run, before this one begins
    traces = [name for name in ("metrics", *([] if taken else ["checkpoints"])) if any(_inside(run_dir / name))]
    return f"{path} is missing, and {' and '.join(traces)} say that the run has begun" if traces else ""


def _inside(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _of_metrics(run_dir: Path, status: dict[str, Any]) -> list[str]:
    found = []
    for role in WRITERS.get(status.get("job", ""), ("orchestrator", "trainer/0")):
        path = metrics_path(run_dir, role)
        try:
            lines = last_lines(path)
        except FileNotFoundError:
            if status.get("step", 0) and status["job"] in WRITERS:
                found.append(f"{path} is missing, and status.json says that step {status['step']} was reached")
        except OSError as error:
            found.append(f"{path} cannot be read: {error.strerror}")
        else:
            rows = [row for line in lines if (row := parse_object(line)) is not None]
            if len(lines) > 1 and not rows:
                found.append(f"{path} cannot be used: none of its last {len(lines)} lines is a JSON object")
            elif status.get("state") == "done" and status["job"] in WRITERS and _last_step(rows) < status["step"]:
                told = f"{path} ends at step {_last_step(rows)}, and status.json says that step {status['step']} was"
                found.append(f"{told} reached: it was cut")
            elif status.get("state") == "done" and lines and parse_object(lines[-1]) is None and _is_torn(path):
                found.append(f"{path} was cut: its last line is no whole row")
    return found


def _is_torn(path: Path) -> bool:
    """Whether its last line has no end."""
    try:
        with open_regular(path) as file:
            file.seek(-1, os.SEEK_END)
            return file.read() != b"\n"
    except OSError:
        return False


def _last_step(rows: list[dict[str, Any]]) -> int:
    return max((step for row in rows if isinstance(step := row.get("step"), int)), default=0)
