"""Which weights a run began with. What is not trained of them (the model under adapters, frozen indexers, layers that
predict further tokens) is in no checkpoint, and read again from where it lay whenever the run goes on or is evaluated.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from prl.config.branching import RECORD as BRANCH
from prl.config.errors import UserError
from prl.runtime.directory.files import read_object_or_default, replace_file

RECORD = "beginning.json"
SPOTS, SPOT_BYTES = 8, 64 << 10  # of each file that are looked at: all of it would take as long as to load it


def note_beginning(run_dir: Path, path: Path) -> None:
    """Of a run that begins: where its weights lie, what is in them, and the hub's commit if they are of it."""
    record = {"path": str(path.absolute()), "sha256": fingerprint_of(path), "commit": _commit_of(path)}
    replace_file(run_dir / RECORD, json.dumps(record, indent=1) + "\n")


def begun_path(run_dir: Path, found: Path) -> Path:
    """Where the weights lie that a run began with: `found`, unless that is another commit of the hub, and the first one
    lies beside it. Raises UserError for a record that is damaged.
    """
    commit = read_object_or_default(run_dir / RECORD, {}).get("commit")
    if isinstance(commit, str) and _commit_of(found) not in (None, commit) and (found.parent / commit).is_dir():
        return found.parent / commit
    return found


def refuse_other_weights(run_dir: Path, path: Path, frozen: str) -> None:
    """Raise UserError unless the weights at `path` are those that the run began with, as far as that is on record.

    frozen: what is read from there again, in words.
    """
    record = read_object_or_default(run_dir / RECORD, {})
    known, commit = record.get("sha256"), record.get("commit")
    if not isinstance(known, str) or known == fingerprint_of(path):
        return
    fix = "put back what was there, or begin another run (another output_dir)"
    if isinstance(commit, str) and _commit_of(path) is not None:
        name = path.parent.parent.name.removeprefix("models--").replace("--", "/")
        fix = f"hf download {name} --revision {commit} brings them back, and the same command resumes"
    if other := read_object_or_default(run_dir / BRANCH, {}).get("run"):
        fix = f"model.path, model.init_seed and warm_start as {other} has them, if they differ; else {fix}"
    raise UserError(
        "The weights that the run began with have been replaced.",
        where=str(path),
        why=f"{frozen} are read from there again, and what was trained belongs to those of before "
        f"({run_dir / RECORD} has their SHA-256)",
        fix=fix,
    )


def fingerprint_of(path: Path) -> str:
    """SHA-256 over names and sizes of a checkpoint's weights, and over some spots of each. Raises OSError."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb") as opened:
            for spot in range(SPOTS):
                opened.seek(max(0, size - SPOT_BYTES) * spot // (SPOTS - 1))
                digest.update(opened.read(SPOT_BYTES))
    return digest.hexdigest()


def _commit_of(path: Path) -> str | None:
    """Of a snapshot in the hub's cache."""
    return path.name if path.parent.name == "snapshots" else None
