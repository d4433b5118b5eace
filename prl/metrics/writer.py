"""Append-only JSON lines, one file per role. Nobody waits for a reader; readers may follow while rows are written."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path
from typing import Any

from prl.runtime.directory.files import LineFile

MAX_PENDING = 10_000  # rows


def metrics_path(run_dir: Path, role_name: str) -> Path:
    """`metrics/<role>.jsonl`, with "/" in the role's name written as "."."""
    return run_dir / "metrics" / f"{role_name.replace('/', '.')}.jsonl"


class MetricsWriter:
    """One role's rows. Every row gets `time` (unix seconds) and `role`.

    A full disk does not end a run here: rows that do not fit are kept, and written before the next ones. The oldest
    are lost when there are too many of them.
    """

    def __init__(self, run_dir: Path, role_name: str) -> None:
        path = metrics_path(run_dir, role_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.role = role_name
        self.pending: list[bytes] = []
        self.file = LineFile(path)

    def log(self, *, step: int, **values: Any) -> None:
        """Append one row.

        Args:
            values: numbers, strings, lists, dicts, arrays and tensors (anything with `tolist`). What is not finite is
                written as "nan", "inf" and "-inf", because JSON has no such numbers; the reader turns them back.
        """
        row = {"time": time.time(), "role": self.role, "step": step} | values
        line = json.dumps(plain_value(row), separators=(",", ":")).encode() + b"\n"
        self.pending = [*self.pending[1 - MAX_PENDING :], line] if self.pending else [line]
        with contextlib.suppress(OSError):
            self.flush()

    def flush(self) -> None:
        """Write what is kept. Raises OSError where there is still no room for it."""
        if self.pending:
            self.file.append(b"".join(self.pending))
            self.pending = []

    def close(self) -> None:
        self.file.close()


def plain_value(value: Any) -> Any:
    """A value that strict JSON can hold."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): plain_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    return plain_value(value.tolist())
