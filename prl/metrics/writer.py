"""Append-only JSON lines, one file per role. Nobody waits for a reader; readers may follow while rows are written."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any


def metrics_path(run_dir: Path, role_name: str) -> Path:
    """`metrics/<role>.jsonl`, with "/" in the role's name written as "."."""
    return run_dir / "metrics" / f"{role_name.replace('/', '.')}.jsonl"


class MetricsWriter:
    """One role's rows. Every row gets `time` (unix seconds) and `role`.

    A full disk costs rows, never the run: `lost_rows` counts them.
    """

    def __init__(self, run_dir: Path, role_name: str) -> None:
        path = metrics_path(run_dir, role_name)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.role = role_name
        self.lost_rows = 0
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        # a writer killed in the middle of a row leaves a torn line; the next row must not be glued to it
        self.torn = _ends_torn(self.fd)

    def log(self, *, step: int, **values: Any) -> None:
        """Append one row.

        Args:
            values: numbers, strings, lists, dicts, arrays and tensors (anything with `tolist`). What is not finite is
                written as "nan", "inf" and "-inf", because JSON has no such numbers; the reader turns them back.
        """
        row = {"time": time.time(), "role": self.role, "step": step} | values
        line = json.dumps(plain_value(row), separators=(",", ":")).encode() + b"\n"
        if self.torn:
            line = b"\n" + line
        try:
            written = os.write(self.fd, line)
        except OSError:
            self.lost_rows += 1
            return
        self.torn = written < len(line)
        self.lost_rows += self.torn

    def close(self) -> None:
        os.close(self.fd)


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


def _ends_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"
