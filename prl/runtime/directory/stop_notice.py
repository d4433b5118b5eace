"""RUN/stop.json: until when a stop must be over, for who decides what can still be saved. Absent: no such limit."""

from __future__ import annotations

import json
import time
from pathlib import Path

from prl.runtime.directory.files import read_object, replace_file

NOTICE = "stop.json"


def write_notice(run_dir: Path, left_s: float) -> None:
    replace_file(run_dir / NOTICE, json.dumps({"deadline": time.time() + left_s}), sync=False)


def clear_notice(run_dir: Path) -> None:
    """At the start of an attempt."""
    (run_dir / NOTICE).unlink(missing_ok=True)


def seconds_left(run_dir: Path) -> float:
    """Infinity where nothing presses. Nodes compare their clocks here, which must agree to about a second."""
    deadline = (read_object(run_dir / NOTICE) or {}).get("deadline")
    return float(deadline) - time.time() if isinstance(deadline, int | float) else float("inf")
