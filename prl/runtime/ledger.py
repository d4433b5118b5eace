"""SWEEP/failures.jsonl: one line for each failed attempt of any point of a sweep, whoever ran it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

LEDGER = "failures.jsonl"
MESSAGE_LENGTH = 1000  # characters


def record_failure(
    point: Path, *, attempt: int, kind: str, message: str, node: str, job: str | None, requeued: bool
) -> None:
    """Append a line to the ledger of the sweep that the point's directory lies in.

    One write to a file opened for appending, under a lock since NFS does not append atomically: the lines of points
    that fail at the same time do not mix.

    Args:
        kind: the class, as `prl.runtime.failures` has them.
        job: as squeue names it, None without SLURM.
        requeued: whether SLURM starts the point again by itself.
    """
    row = {"point": point.name, "attempt": attempt, "class": kind, "message": message[:MESSAGE_LENGTH]}
    row |= {"node": node, "job": job, "time": time.time(), "requeued": requeued}
    with contextlib.suppress(OSError):  # a full disk costs the line, and not what the caller does next
        append(point.parent / LEDGER, json.dumps(row).encode() + b"\n")


def append(path: Path, line: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):  # no locks here: local filesystems append atomically without
            fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, line)
    finally:
        os.close(fd)


def read_failures(sweep_dir: Path) -> list[dict[str, Any]]:
    """All rows in the order of writing; lines that a full disk has torn are left out."""
    try:
        lines = (sweep_dir / LEDGER).read_text(errors="replace").splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def summarise_failures(sweep_dir: Path) -> str:
    """`failed attempts: 2 node (2 requeued), 1 oom`, or nothing."""
    rows = read_failures(sweep_dir)
    counts, again = Counter(row["class"] for row in rows), Counter(row["class"] for row in rows if row["requeued"])
    parts = [f"{n} {kind}" + (f" ({again[kind]} requeued)" if again[kind] else "") for kind, n in counts.most_common()]
    return f"failed attempts: {', '.join(parts)}; see {sweep_dir / LEDGER}" if parts else ""
