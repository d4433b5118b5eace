"""What a person names on the command line, as points: directories, wandb's own files, groups of wandb; or several."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from prl.compare import wandb_source
from prl.compare.points import SWEEP_FILE, Point, read_directory
from prl.compare.wandb_file import find_files, read_files
from prl.config.console import one_line
from prl.config.errors import UserError
from prl.metrics.wandb_mirror import has_key
from prl.runtime.directory.files import find_directories, refuse_unreadable, why_no_object
from prl.runtime.people.faults import holds_run
from prl.status import ask_record, how_sweep_goes_on

TARGET = "target"  # the column of --by-target


def read_targets(targets: Sequence[str], by_target: bool = False) -> tuple[list[Point], list[str]]:
    """The points of all, and what is to be said of them. A run that several have (a directory, and wandb's copy of it)
    counts once, as the first of them has it.

    Args:
        by_target: points of different targets are never of one group.

    Raises UserError for one in which there is no run.
    """
    points: list[Point] = []
    known: set[str] = set()
    notes = []
    for target, label in zip(targets, labels(targets), strict=True):
        place = Path(target).expanduser()
        silent = ask_record(place)[0] if os.path.exists(place / SWEEP_FILE) else {}
        found = _read(target, silent)
        notes += [one_line(why) for why in _damage_of_record(place)]
        if os.path.exists(place / SWEEP_FILE):
            notes += map(one_line, how_sweep_goes_on(place, [point.name for point in found], silent))
        new = [point for point in found if not point.run_id or point.run_id not in known]
        known |= {point.run_id for point in new if point.run_id}
        if len(new) < len(found):
            notes.append(f"{one_line(target)}: {len(found) - len(new)} of its runs are among those named before it")
        for point in new:
            if len(targets) > 1:
                point.name = f"{label}/{point.name}"
            if by_target:
                point.swept = {TARGET: label, **point.swept}
        points += new
    return points, notes


def labels(targets: Sequence[str]) -> list[str]:
    """A short name for each, the whole where short ones are the same."""
    short = [Path(target).expanduser().absolute().name for target in targets]
    return list(map(one_line, short if len(set(short)) == len(short) else targets))


def _read(target: str, silent: Mapping[str, tuple[str, str]]) -> list[Point]:
    place = Path(target).expanduser()
    refuse_unreadable(place)
    if not os.path.lexists(place):
        return _from_wandb(target)
    files = find_files(place)
    if files and not _holds_runs(place):
        return [wandb_source.read_run(run) for run in read_files(files)]
    return read_directory(place, silent)


def _damage_of_record(place: Path) -> list[str]:
    """Of a sweep whose list of points cannot be read: those without a directory are not shown."""
    path = place / SWEEP_FILE
    why = why_no_object(path) if os.path.lexists(path) else ""
    return [f"{why}; points that have not begun are not shown"] if why else []


def _holds_runs(place: Path) -> bool:
    """Whether run directories are there, which know more than wandb does."""
    return holds_run(place) or bool(find_directories(place, holds_run))


def _from_wandb(target: str) -> list[Point]:
    if not has_key(os.environ):
        raise UserError(
            f"there is no directory {target}, and wandb cannot be asked for a group of that name",
            where=target,
            why="neither WANDB_API_KEY nor ~/.netrc holds a key",
            fix="name the directory of a sweep, say outputs/sweeps/NAME, or log in: wandb login",
        )
    return wandb_source.read_group(target, wandb_source.connect(target))
