"""What a run reads that others may change meanwhile: modules of the user's own, files of data, weights.

A configuration names them by where they lie. So that a curve is not of two reward functions, nor a result of weights
that lie there no more, what was in them is kept beside it.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import prl
from prl.config.schema import RunConfig
from prl.runtime.directory.files import read_object, replace_file
from prl.runtime.directory.own_modules import describe_modules, files_of, find_own_modules

WHOLE_BYTES = 64 << 20  # a larger file, or one in a directory, is known by its size, its beginning and its end
ENDS_BYTES = 256 << 10
CODE_SUFFIXES = (".py", ".json", ".jinja", ".txt")
MOST_FILES = 1_000  # of a directory


def describe_inputs(config: RunConfig) -> dict[str, dict[str, Any]]:
    """For records: `modules` by name with their places, `data`, files and directories, by path, and `code`, this
    package; each with the hash of what is in it.
    """
    data = {path: fingerprint(Path(path).expanduser()) for path in sorted(_paths_in(_data_of(config)))}
    return {
        "modules": describe_modules(find_own_modules(config)),
        "data": {path: {"sha256": found} for path, found in data.items() if found is not None},
        "code": {"prl": {"sha256": _own_hash()}},
    }


def package_files(package: Path) -> list[Path]:
    """Of prl, what runs: what the copies of a sweep hold, too, and no README or page."""
    return [path for path in files_of(package) if path.suffix in CODE_SUFFIXES]


def package_hash(package: Path) -> str:
    """The same for a checkout and for the copies of a sweep."""
    digest = hashlib.sha256()
    for path in package_files(package):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@functools.cache
def _own_hash() -> str:
    return package_hash(Path(prl.__file__).parent)


def fingerprint(path: Path) -> str | None:
    """SHA-256 of a file, or over the names, sizes and both ends of the files in a directory, large files by their ends
    alone; None if it cannot be read now.
    """
    if not path.exists():
        return None
    digest = hashlib.sha256()
    try:
        for file in itertools.islice(files_of(path), MOST_FILES):
            size = file.stat().st_size
            digest.update(f"{file.relative_to(path.parent)}\0{size}\0".encode(errors="surrogateescape"))
            with file.open("rb") as opened:
                if path.is_file() and size <= WHOLE_BYTES:
                    digest.update(opened.read())
                    continue
                digest.update(opened.read(ENDS_BYTES))
                opened.seek(max(size - ENDS_BYTES, 0))
                digest.update(opened.read(ENDS_BYTES))
    except OSError:
        return None
    return digest.hexdigest()


def note_changes(record: Path, config: RunConfig, attempt: int) -> list[str]:
    """Names of what has changed since the attempt before. It is kept in `record` (env.json) under `later`, with the
    number of the attempt from which on it holds.
    """
    before = read_object(record)
    if before is None:
        return []
    told, changed = _changes(before, config)
    if changed:
        later = before["later"] if isinstance(before.get("later"), list) else []
        replace_file(record, json.dumps(before | {"later": [*later, {"attempt": attempt, **changed}]}, indent=1) + "\n")
    return told


def what_changed(record: Path, config: RunConfig) -> list[str]:
    """The same names, and nothing is kept."""
    before = read_object(record)
    return [] if before is None else _changes(before, config)[0]


def _changes(before: dict[str, Any], config: RunConfig) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Names of what is other than env.json says, and all that is other or new, by kind."""
    told, changed = [], dict[str, dict[str, Any]]()
    for kind, found in describe_inputs(config).items():
        known = hashes_in(before, kind)
        for name, what in found.items():
            if known.get(name) != what["sha256"]:
                changed.setdefault(kind, {})[name] = what
                told += [name] if name in known else []
    return told, changed


def hashes_in(record: dict[str, Any], kind: str) -> dict[str, str]:
    """Name -> hash of one kind in env.json, as of its last attempt."""
    later = record.get("later")
    rows = [row for row in (record, *(later if isinstance(later, list) else [])) if isinstance(row, dict)]
    found = {name: _hash_in(described) for name, described in _merged(rows, kind).items()}
    return {name: value for name, value in found.items() if isinstance(value, str)}


def _hash_in(described: Any) -> Any:
    return described.get("sha256") if isinstance(described, dict) else None


def _merged(rows: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    return {name: value for row in rows if isinstance(row.get(kind), dict) for name, value in row[kind].items()}


def _data_of(config: RunConfig) -> Any:
    sft = config.sft.model_dump(mode="json") if config.sft is not None else {}
    return [sft.get("data"), [env.args for env in config.env.mix.values()], config.env.args]


def _paths_in(value: Any) -> set[str]:
    """Strings that name what is there."""
    if isinstance(value, dict):
        return {path for inner in value.values() for path in _paths_in(inner)}
    if isinstance(value, list | tuple):
        return {path for inner in value for path in _paths_in(inner)}
    try:
        return {value} if isinstance(value, str) and value and Path(value).expanduser().exists() else set()
    except (OSError, ValueError, RuntimeError):  # too long for a name, a null byte in it, a home that is none
        return set()
