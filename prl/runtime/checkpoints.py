"""Complete or absent: a checkpoint is staged beside its place, described by a manifest, and renamed as a whole.

Roles write their parts into `staging_dir`; the last one calls `commit`. Readers trust only what `latest_valid` returns.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

from prl.config.errors import UserError

MANIFEST = "manifest.json"
PARTIAL = ".partial"
CHUNK_BYTES = 1 << 22
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)


def checkpoints_dir(run_dir: Path) -> Path:
    return run_dir / "checkpoints"


def step_dir(run_dir: Path, step: int) -> Path:
    return checkpoints_dir(run_dir) / f"step_{step}"


def staging_dir(run_dir: Path, step: int) -> Path:
    """`checkpoints/step_N.partial`, made if absent. Raises UserError when the disk is full."""
    path = checkpoints_dir(run_dir) / f"step_{step}{PARTIAL}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise_if_full(error, run_dir, step)
        raise
    return path


def commit(run_dir: Path, step: int, keep: int) -> Path:
    """Make the staged checkpoint of `step` the newest one and drop all but the `keep` newest.

    Raises UserError when the disk is full; the staged files are removed then and older checkpoints are untouched.
    """
    staged, final = staging_dir(run_dir, step), step_dir(run_dir, step)
    try:
        _write_manifest(staged, step)
    except OSError as error:
        raise_if_full(error, run_dir, step)
        raise
    if final.exists():  # left by an attempt that resumed from an earlier step, or damaged
        _remove(final)
    os.rename(staged, final)
    _sync(final.parent)
    prune(run_dir, keep)
    return final


def raise_if_full(error: OSError, run_dir: Path, step: int) -> None:
    """Turn ENOSPC and EDQUOT into a UserError, and give back the space of the unfinished checkpoint."""
    if error.errno in FULL_DISK:
        shutil.rmtree(checkpoints_dir(run_dir) / f"step_{step}{PARTIAL}", ignore_errors=True)
        raise full_disk_error(run_dir, step) from error


def full_disk_error(run_dir: Path, step: int) -> UserError:
    older = steps(run_dir)
    survivor = f"The checkpoint of step {older[-1]} survives." if older else "There is no older checkpoint."
    return UserError(
        f"The disk is full: the checkpoint of step {step} could not be written. {survivor}",
        where=str(step_dir(run_dir, step)),
        why="no space left on the device, or a quota is exceeded",
        fix=f"free space, or lower ckpt.keep; the same command with output_dir={run_dir} resumes",
    )


def steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are complete by name, ascending."""
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in checkpoints_dir(run_dir).glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def latest_valid(run_dir: Path, report: Callable[[str], None] | None = None) -> tuple[int, Path] | None:
    """The newest checkpoint whose every file is what was written, or None.

    Args:
        report: gets one line per damaged checkpoint, naming the file; stderr by default.
    """
    for step in reversed(steps(run_dir)):
        path = step_dir(run_dir, step)
        damage = find_damage(path)
        if damage is None:
            return step, path
        line = f"checkpoint of step {step} is damaged and skipped: {damage}"
        report(line) if report else print(line, file=sys.stderr)
    return None


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint directory, naming the file; None if it is as written."""
    manifest = path / MANIFEST
    try:
        files = json.loads(manifest.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{manifest}: {error}"
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != expected["bytes"]:
            return f"{file} has {file.stat().st_size} bytes, not {expected['bytes']}"
        if _crc32(file) != expected["crc32"]:
            return f"{file} has another checksum than when it was written"
    return None


def prune(run_dir: Path, keep: int) -> None:
    """Remove all complete checkpoints but the `keep` newest."""
    for step in steps(run_dir)[:-keep]:
        _remove(step_dir(run_dir, step))


def discard_after(run_dir: Path, step: int) -> None:
    """Remove unfinished checkpoints, and those of steps beyond `step`: damaged ones, when a run resumes before them."""
    discard_unfinished(run_dir)
    for later in steps(run_dir):
        if later > step:
            _remove(step_dir(run_dir, later))


def discard_unfinished(run_dir: Path) -> None:
    for path in checkpoints_dir(run_dir).glob(f"*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)


def _remove(path: Path) -> None:
    """Rename first: a removal that is cut short must not leave half a checkpoint under a good name."""
    doomed = path.with_name(f"{path.name}.old{PARTIAL}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _write_manifest(staged: Path, step: int) -> None:
    files = {}
    for path in sorted(path for path in staged.rglob("*") if path.is_file() and path.name != MANIFEST):
        _sync(path)
        files[str(path.relative_to(staged))] = {"bytes": path.stat().st_size, "crc32": _crc32(path)}
    manifest = staged / MANIFEST
    manifest.write_text(json.dumps({"step": step, "files": files}, indent=1) + "\n")
    _sync(manifest)
    _sync(staged)


def _crc32(path: Path) -> int:
    value = 0
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            value = zlib.crc32(chunk, value)
    return value


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
