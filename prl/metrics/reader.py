"""Reading what the roles wrote: whole files, a file that still grows, and cutting a file back when a run resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prl.metrics.writer import metrics_path
from prl.runtime.directory.files import open_regular, parse_json, parse_object, replace_file

Row = dict[str, Any]
NOT_FINITE = {"nan": float("nan"), "inf": float("inf"), "-inf": float("-inf")}


class Tail:
    """Follows one file. It may not exist yet; a torn last line is left for later."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0  # bytes consumed

    def poll(self) -> list[Row]:
        """Rows completed since the last call."""
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                data = file.read()
        except OSError:  # not there yet, or not now: the next call reads on
            return []
        complete = data.rfind(b"\n") + 1
        self.offset += complete
        return _parse_all(data[:complete])


def read_rows(run_dir: Path, role_name: str) -> list[Row]:
    """All rows of one role, in the order of writing; empty if it wrote none. A last row without the end of its line
    counts: nobody may be there to write on.
    """
    try:
        with open_regular(metrics_path(run_dir, role_name)) as file:
            return _parse_all(file.read())
    except OSError:
        return []


def truncate_rows(run_dir: Path, resume_step: int) -> None:
    """Cut all files back to what the checkpoint of `resume_step` has seen; 0 (no checkpoint) starts them afresh."""
    for path in sorted((run_dir / "metrics").glob("*.jsonl")):
        if resume_step == 0:
            path.unlink()
            continue
        kept = [row for row in path.read_bytes().splitlines() if _is_kept(row, resume_step)]
        replace_file(path, b"".join(line + b"\n" for line in kept))


def _is_kept(line: bytes, resume_step: int) -> bool:
    row = _parse(line)
    return row is not None and isinstance(step := row.get("step", 0), int) and step <= resume_step


def _parse_all(data: bytes) -> list[Row]:
    """The rows of whole lines. All at once, a third of the time, unless one is torn or a number is not finite."""
    if not any(f'"{word}"'.encode() in data for word in NOT_FINITE):
        try:
            rows = parse_json(b"[" + b",".join(data.splitlines()) + b"]")
        except ValueError:
            pass
        else:
            return [row for row in rows if isinstance(row, dict)]
    return [row for line in data.splitlines() if (row := _parse(line)) is not None]


def _parse(line: bytes) -> Row | None:
    """The row, or None for a line torn by a crash or a full disk."""
    row = parse_object(line)
    return row and {
        key: NOT_FINITE.get(value, value) if isinstance(value, str) else value for key, value in row.items()
    }
