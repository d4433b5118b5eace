"""SWEEP/failures.jsonl: one line for each failed attempt of any point of a sweep, whoever ran it."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path
from typing import Any

from prl.runtime.directory.files import append_objects, read_objects

LEDGER = "failures.jsonl"
MESSAGE_LENGTH = 1000  # characters


def record_failure(
    point: Path, *, attempt: int, kind: str, message: str, node: str, job: str | None, requeued: bool
) -> None:
    """Append a line to the ledger of the sweep that the point's directory lies in.

    Args:
        kind: the class, as `prl.runtime.process.failures` has them.
        job: as squeue names it, None without SLURM.
        requeued: whether SLURM starts the point again by itself.
    """
    row = {"point": point.name, "attempt": attempt, "class": kind, "message": message[:MESSAGE_LENGTH]}
    row |= {"node": node, "job": job, "time": time.time(), "requeued": requeued}
    with contextlib.suppress(OSError):  # a full disk costs the line, and not what the caller does next
        append_objects(point.parent / LEDGER, [row])


def read_failures(sweep_dir: Path) -> list[dict[str, Any]]:
    """All rows in the order of writing; lines that are torn are left out."""
    return [row for row in read_objects(sweep_dir / LEDGER) if isinstance(row.get("class"), str)]


def last_failure(point: Path) -> str:
    """Class and first line of a point's last failed attempt; "" for none."""
    rows = [row for row in read_failures(point.parent) if row.get("point") == point.name]
    return f"{rows[-1]['class']}: {str(rows[-1].get('message')).partition(chr(10))[0]}" if rows else ""


def summarise_failures(sweep_dir: Path) -> str:
    """`failed attempts: 2 node (2 requeued), 1 oom`, or nothing."""
    rows = read_failures(sweep_dir)
    counts, again = Counter(row["class"] for row in rows), Counter(row["class"] for row in rows if row.get("requeued"))
    parts = [f"{n} {kind}" + (f" ({again[kind]} requeued)" if again[kind] else "") for kind, n in counts.most_common()]
    return f"failed attempts: {', '.join(parts)}; see {sweep_dir / LEDGER}" if parts else ""
