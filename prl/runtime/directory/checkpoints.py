"""Complete or absent: a checkpoint is staged beside its place, described by a manifest, and renamed as a whole.

Roles write their parts into `staging_dir`; the last one has them committed (`prl.runtime.directory.commits`). A
directory without all parts of its job is never committed, and readers trust only what `latest_valid` returns.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prl.config.errors import PassingError, UserError
from prl.runtime.directory.checksums import piece_checksums, whole_checksum
from prl.runtime.directory.files import FULL_DISK, PARTIAL, move_away, refuse_unreadable, replace_file, sync_directory

MANIFEST = "manifest.json"
GONE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # damage; other errors may pass
TRAINER, ORCHESTRATOR = "trainer", "orchestrator"


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


def parts_of(job: str) -> tuple[str, ...]:
    """The directories that a checkpoint of a job consists of."""
    return (TRAINER, ORCHESTRATOR) if job == "rl" else (TRAINER,)


def commit(
    run_dir: Path,
    step: int,
    keep: int,
    parts: tuple[str, ...],
    moved: Callable[[], None] = lambda: None,
    in_haste: bool = False,
) -> Path:
    """Make the staged checkpoint of `step` the newest one and drop all but the `keep` newest.

    Done before, it does nothing: what a late caller has staged beside a complete checkpoint is thrown away.

    Args:
        parts: of `parts_of`; without all of them nothing is committed.
        moved: called, from any thread, whenever there is progress.
        in_haste: without checksums, and without waiting for the disk; files then count if they have their sizes.

    Raises UserError when the disk is full; the staged files are removed then and older checkpoints are untouched.
    """
    staged, final = checkpoints_dir(run_dir) / f"step_{step}{PARTIAL}", step_dir(run_dir, step)
    missing = [part for part in parts if not any((staged / part).glob("*"))]
    if missing and final.exists():
        shutil.rmtree(staged, ignore_errors=True)
        return final
    if missing:
        raise RuntimeError(f"the checkpoint of step {step} has no part {' and '.join(missing)}: {staged}")
    try:
        if in_haste:
            write_sizes(staged, step)
        else:
            _write_manifest(staged, step, moved)
    except OSError as error:
        raise_if_full(error, run_dir, step)
        raise
    if final.exists():  # left by an attempt that resumed from an earlier step, or damaged
        _remove(final)
    os.rename(staged, final)
    sync_directory(final.parent)
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
    return PassingError(
        f"The disk is full: the checkpoint of step {step} could not be written. {survivor}",
        where=str(step_dir(run_dir, step)),
        why="no space left on the device, or a quota is exceeded",
        fix="free space, or lower ckpt.keep; the same command resumes (of a run by itself with "
        f"output_dir={shlex.quote(str(run_dir))})",
    )


def steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints that are complete by name, ascending; none where the directory cannot be read."""
    found = (re.fullmatch(r"step_(\d+)", path.name) for path in checkpoints_dir(run_dir).glob("step_*"))
    return sorted(int(match[1]) for match in found if match)


def latest_valid(
    run_dir: Path,
    parts: tuple[str, ...],
    report: Callable[[str], None] | None = None,
    besides: int | None = None,
) -> tuple[int, Path] | None:
    """The newest checkpoint that has all parts, and whose every file is what was written, or None.

    Args:
        parts: of `parts_of`.
        report: gets one line per damaged checkpoint, naming the file; stderr by default.
        besides: a step that is not asked for.

    Raises UserError for one that cannot be read now, nor the directory of all: nobody knows whether it is good.
    """
    refuse_unreadable(checkpoints_dir(run_dir))
    for step in reversed(steps(run_dir)):
        if step == besides:
            continue
        damage = damage_of_step(run_dir, step, parts)
        if damage is None:
            return step, step_dir(run_dir, step)
        line = f"checkpoint of step {step} is damaged and skipped: {damage}"
        report(line) if report else print(line, file=sys.stderr)
    return None


def damage_of_step(run_dir: Path, step: int, parts: tuple[str, ...]) -> str | None:
    """As `find_damage`, of one step's checkpoint. Raises UserError where that cannot be told now."""
    path = step_dir(run_dir, step)
    try:
        return find_damage(path, parts) or _of_another_step(path / MANIFEST, step)
    except OSError as error:
        raise UserError(
            f"The checkpoint of step {step} cannot be read now: {error.strerror or error}",
            where=str(error.filename or path),
            why="it may be good, so it is neither skipped nor removed",
            fix=f"the same command when the disk answers again; to do without it: {move_away(path, 'unreadable')}",
        ) from error


def _of_another_step(manifest: Path, step: int) -> str | None:
    """A copy under another name is no checkpoint of the step that this says."""
    said = json.loads(manifest.read_text()).get("step", step)
    return None if said == step else f"{manifest} says that it is of step {said}"


def find_damage(path: Path, parts: tuple[str, ...]) -> str | None:
    """What is wrong with a checkpoint directory, naming the file; None if it is as written.

    Raises OSError if that cannot be told, since a file that is there cannot be read.
    """
    manifest = path / MANIFEST
    try:
        files = {path / name: (int(about["bytes"]), about["crc32"]) for name, about in _listed(manifest).items()}
    except GONE as error:
        return f"{manifest}: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{manifest} does not say which files there are"
    for part in parts:
        if not any(file.is_relative_to(path / part) for file in files):
            return f"{path / part} is missing"
    try:
        for file, (size, _) in files.items():
            about = file.stat()
            if not stat.S_ISREG(about.st_mode):
                return f"{file} is no file"
            if about.st_size != size:
                return f"{file} has {about.st_size} bytes, not {size}"
        return _find_changed({file: checksum for file, (_, checksum) in files.items() if checksum is not None})
    except GONE as error:
        return f"{error.filename} is missing"


def _listed(manifest: Path) -> dict[str, dict[str, Any]]:
    return json.loads(manifest.read_text())["files"]


def _find_changed(checksums: dict[Path, list[int] | int]) -> str | None:
    """The first file that has another checksum; a single number is the whole file's, of earlier versions."""
    in_pieces = [file for file, expected in checksums.items() if not isinstance(expected, int)]
    found: dict[Path, list[int] | int] = dict(zip(in_pieces, piece_checksums(in_pieces), strict=True))
    for file, expected in checksums.items():
        if (found[file] if file in found else whole_checksum(file)) != expected:
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


def _files_of(staged: Path) -> list[Path]:
    return sorted(path for path in staged.rglob("*") if path.is_file() and path.name != MANIFEST)


def write_sizes(staged: Path, step: int | None = None) -> None:
    """A manifest without checksums."""
    sizes = {str(path.relative_to(staged)): path.stat().st_size for path in _files_of(staged)}
    files = {name: {"bytes": size, "crc32": None} for name, size in sizes.items()}
    replace_file(staged / MANIFEST, json.dumps({"step": step, "files": files}, indent=1) + "\n")


def _write_manifest(staged: Path, step: int, moved: Callable[[], None]) -> None:
    """Of a checkpoint."""
    write_manifest(staged, step, moved)


def write_manifest(staged: Path, step: int | None = None, moved: Callable[[], None] = lambda: None) -> None:
    """Of all files, which are on the disk then. step: None for what is no checkpoint of a step."""
    paths = _files_of(staged)
    files = {
        str(path.relative_to(staged)): {"bytes": path.stat().st_size, "crc32": pieces}
        for path, pieces in zip(paths, piece_checksums(paths, sync=True, moved=moved), strict=True)
    }
    replace_file(staged / MANIFEST, json.dumps({"step": step, "files": files}, indent=1) + "\n")
