"""`<run>/rollouts/`: the rollouts that a run keeps for people, with their tokens. Both sides of the format.

    rollouts-000001.jsonl    the orchestrator's, one line per rollout; the number is that of the first step in it
    trainer.0-000001.jsonl   a trainer rank's: what it made of the documents in them
    tokens-000000.jsonl      what token ids stand for; ids are told once

Arrays of numbers are base64 of little-endian bytes, so that a line of many tokens is written and read in microseconds.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from prl.runtime.directory.files import append_objects, parse_object, replace_file

DIRECTORY = "rollouts"
ROLLOUTS, TOKENS, TRAINER = "rollouts", "tokens", "trainer"  # how the names of the three kinds of files begin
SEGMENTS = 16  # files among which the bytes of one kind are divided; the unit in which they are given up
NAME = re.compile(r"(.+)-(\d{6,})\.jsonl")
DTYPES = {"i": np.dtype("<i4"), "f": np.dtype("<f4")}


class SegmentedLog:
    """Rows in files of bounded size, and of bounded number: beyond it the oldest goes, but never the first one, which
    shows how the run began.
    """

    def __init__(self, run_dir: Path, kind: str, max_bytes: int, resume_step: int) -> None:
        """Rows of steps after `resume_step` are dropped: those steps are about to be done again. Raises OSError."""
        self.directory, self.kind = run_dir / DIRECTORY, kind
        self.segment_bytes = max(1, max_bytes // SEGMENTS)
        self.directory.mkdir(exist_ok=True)
        for path in segments(run_dir, kind):
            _cut(path, resume_step)
        self.current = next(iter(reversed(segments(run_dir, kind))), None)

    def append(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Add the rows of a step. Raises OSError."""
        if not rows:
            return
        if self.current is None or _size(self.current) >= self.segment_bytes:
            self.current = self.directory / f"{self.kind}-{step:06d}.jsonl"
            for old in segments(self.directory.parent, self.kind)[1 : 2 - SEGMENTS]:
                old.unlink(missing_ok=True)
        append_objects(self.current, rows)


def segments(run_dir: Path, kind: str) -> list[Path]:
    """The files of a kind, the oldest first."""
    found = []
    for path in (run_dir / DIRECTORY).glob(f"{kind}-*.jsonl"):
        named = NAME.fullmatch(path.name)
        if named and named[1] == kind:
            found.append((int(named[2]), path))
    return [path for _, path in sorted(found)]


def trainer_kinds(run_dir: Path) -> list[str]:
    """The kinds of files that trainer ranks wrote."""
    names = (NAME.fullmatch(path.name) for path in (run_dir / DIRECTORY).glob(f"{TRAINER}.*.jsonl"))
    return sorted({named[1] for named in names if named})


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _cut(path: Path, resume_step: int) -> None:
    """Leave the rows up to `resume_step`; a file that holds no others is left as it is."""
    if resume_step == 0:  # there is no checkpoint: all is done again
        path.unlink()
        return
    lines = path.read_bytes().splitlines()
    if lines and _step(lines[-1]) is not None and all((_step(line) or 0) <= resume_step for line in lines):
        return
    kept = [line for line in lines if (step := _step(line)) is not None and step <= resume_step]
    if kept:
        replace_file(path, b"".join(line + b"\n" for line in kept))
    else:
        path.unlink()


def _step(line: bytes) -> int | None:
    step = (parse_object(line) or {}).get("step")
    return step if isinstance(step, int) else None


# --- arrays -----------------------------------------------------------------------------------------------------------


def pack(values: Iterable[float] | np.ndarray, kind: str) -> str:
    """Numbers as text: "i" for int32, "f" for float32."""
    array = values if isinstance(values, np.ndarray) else np.array(list(values))
    return base64.b64encode(array.astype(DTYPES[kind]).tobytes()).decode()


def unpack(text: Any, kind: str) -> np.ndarray:
    """What `pack` was given; empty for anything else."""
    with contextlib.suppress(binascii.Error, ValueError, TypeError):
        return np.frombuffer(base64.b64decode(text, validate=True), DTYPES[kind])
    return np.zeros(0, DTYPES[kind])


def document_name(input_ids: Iterable[int] | np.ndarray) -> str:
    """What orchestrator and trainer call a document alike, by its tokens."""
    data = np.asarray(input_ids, dtype="<i8").tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


# --- tokens -----------------------------------------------------------------------------------------------------------


def token_rows(pieces: dict[int, bytes]) -> list[dict[str, Any]]:
    """A row that tells what ids stand for; as hexadecimal digits, for a token may be half a character."""
    return [{"step": 0, "tokens": {str(token): piece.hex() for token, piece in pieces.items()}}] if pieces else []


def read_tokens(rows: Iterable[dict[str, Any]]) -> dict[int, bytes]:
    """All that rows of `token_rows` tell."""
    found: dict[int, bytes] = {}
    for row in rows:
        told = row.get("tokens")
        for token, piece in told.items() if isinstance(told, dict) else ():
            with contextlib.suppress(ValueError, TypeError):
                found[int(token)] = bytes.fromhex(piece)
    return found
