"""`python -m prl.status DIR`: what one run, or every run under a directory, is doing, and why it failed."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from prl.runtime.rundir import is_locked
from prl.runtime.status_file import FINAL_STATES, read_status, status_path
from prl.runtime.view import clock

HEADER = ("run", "state", "step", "attempt", "updated", "why")
WHY_WIDTH = 80


def main() -> None:
    parser = argparse.ArgumentParser(prog="prl status", description=__doc__)
    parser.add_argument("directory", type=Path, help="a run directory, or a directory of them (a sweep)")
    directory = parser.parse_args().directory
    if status_path(directory).exists():
        print(render_run(directory))
        return
    runs = find_runs(directory)
    if not runs:
        print(f"no run in {directory}", file=sys.stderr)
        sys.exit(2)
    print(render_runs(directory, runs))


def find_runs(directory: Path) -> list[Path]:
    """Run directories at any depth below, not looking into runs."""
    found = []
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if status_path(path).exists():
            found.append(path)
        elif path.is_dir():
            found += find_runs(path)
    return found


def true_state(run_dir: Path, status: dict[str, Any]) -> str:
    """The state, or "lost" for a run that says it is alive and holds no lock: its machine went down."""
    alive = status["state"] not in FINAL_STATES
    return "lost" if alive and not is_locked(run_dir) else status["state"]


def render_run(run_dir: Path) -> str:
    """One run in full."""
    status = read_status(run_dir)
    lines = [
        f"{run_dir}: {true_state(run_dir, status)}, step {status['step']}/{status['max_steps']}",
        f"point {status['point_id']}, job {status['job']}, attempt {status['attempt']}, updated {_ago(status)} ago",
    ]
    for name, role in status["roles"].items():
        exit_code = "" if role["exit"] is None else f" with exit code {role['exit']}"
        lines.append(f"  {name:<20} {role['state']}{exit_code} (process {role['pid']})")
    failure = status["failure"]
    if failure:
        lines.append(f"{failure['role']} failed, class {failure['class']}: {failure['message']}")
        lines += [f"  | {line}" for line in failure["log_tail"]]
    return "\n".join(lines)


def render_runs(directory: Path, runs: list[Path]) -> str:
    """A table, one row per run."""
    rows = [HEADER, *(_row(directory, run) for run in runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(HEADER))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _row(directory: Path, run: Path) -> tuple[str, ...]:
    status = read_status(run)
    failure = status["failure"]
    why = f"{failure['class']}: {failure['role']}: {failure['message']}"[:WHY_WIDTH] if failure else ""
    step = f"{status['step']}/{status['max_steps']}"
    state = true_state(run, status)
    return (str(run.relative_to(directory)), state, step, str(status["attempt"]), f"{_ago(status)} ago", why)


def _ago(status: dict[str, Any]) -> str:
    return clock(time.time() - status["updated"])


if __name__ == "__main__":
    main()
