"""Runs as wandb's own files hold them, offline or not yet synchronised: no network, no key.

A file RUN_ID.wandb is a log of records (wandb_internal.proto) in LevelDB's log format: blocks of 32 KiB, in them pieces
of a header of 7 bytes (CRC-32, length, kind) and data; a record is one whole piece, or a first, middle ones and a last.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prl.config.errors import UserError

MAGIC = b":W&B"
FILE_HEADER, PIECE_HEADER = 7, struct.Struct("<IHB")
BLOCK = 32768
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4
FINISHED, CRASHED, RUNNING = "finished", "crashed", "running"


@dataclass
class WandbRun:
    """What `prl.compare.wandb_source.read_run` reads, whether it comes from files or from wandb's public API."""

    id: str
    name: str = ""
    group: str = ""
    state: str = RUNNING  # until the file tells the end: it runs, or was killed
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


def find_files(target: Path) -> list[Path]:
    """At any depth, oldest first, so that a resumed run's rows come in the order in which they were made."""
    files = [target] if target.suffix == ".wandb" else target.rglob("*.wandb") if target.is_dir() else []
    return sorted(files, key=lambda path: (path.parent.name, path))


def read_files(files: Iterable[Path]) -> list[WandbRun]:
    """One run for each id; a run that was resumed has several files. Raises UserError for a file that is none."""
    runs: dict[str, WandbRun] = {}
    for path in files:
        run: WandbRun | None = None
        for record in read_records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = runs.setdefault(record.run.run_id, WandbRun(record.run.run_id))
                run.name, run.group, run.state = record.run.display_name, record.run.run_group, RUNNING
                run.config |= _items(record.run.config.update)
            elif run is None:
                continue
            elif kind == "config":
                run.config |= _items(record.config.update)
            elif kind == "summary":
                run.summary |= _items(record.summary.update)
            elif kind == "history":
                run.history.append(_items(record.history.item))
            elif kind == "exit":
                run.state = CRASHED if record.exit.exit_code else FINISHED
    return list(runs.values())


def read_records(path: Path) -> Iterator[Any]:
    """The records (wandb_internal.Record) of one file; what was being written when its run died is left out."""
    from google.protobuf.message import DecodeError
    from wandb.proto import wandb_internal_pb2

    data = path.read_bytes()
    if not data.startswith(MAGIC):
        raise UserError(f"{path} is no file of wandb's.", where=str(path), fix="name the directory of the runs")
    for piece in _whole_records(data):
        record = wandb_internal_pb2.Record()  # type: ignore[attr-defined]
        try:
            record.ParseFromString(piece)
        except DecodeError:
            return
        yield record


def _whole_records(data: bytes) -> Iterator[bytes]:
    at, parts = FILE_HEADER, list[bytes]()
    while at + PIECE_HEADER.size <= len(data):
        if BLOCK - at % BLOCK < PIECE_HEADER.size:  # no header fits: the rest of the block is padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = PIECE_HEADER.unpack_from(data, at)
        piece = data[at + PIECE_HEADER.size : at + PIECE_HEADER.size + length]
        at += PIECE_HEADER.size + length
        if len(piece) < length or kind not in (WHOLE, FIRST, MIDDLE, LAST):
            return
        parts = [piece] if kind in (WHOLE, FIRST) else [*parts, piece]
        if kind in (WHOLE, LAST):
            yield b"".join(parts)


def _items(items: Iterable[Any]) -> dict[str, Any]:
    """Keys with dots for nested ones, and plain values."""
    return {item.key or ".".join(item.nested_key): _value(item) for item in items}


def _value(item: Any) -> Any:
    if item.value_json:
        return json.loads(item.value_json)
    for name in ("number", "integer", "text", "boolean", "json"):  # newer ones have a field for each type
        if name in item.DESCRIPTOR.fields_by_name and item.HasField(name):
            value = getattr(item, name)
            return json.loads(value) if name == "json" else value
    return None
