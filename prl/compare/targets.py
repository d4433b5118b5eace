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
from prl.runtime.people.faults import UNREADABLE, holds_run
from prl.status import ask_record, how_sweep_goes_on

SHOWN = 3  # points in a note
TARGET = "target"  # the column of --by-target


def read_targets(targets: Sequence[str], by_target: bool = False) -> tuple[list[Point], list[str]]:
    """The points of all, and what is to be said of them. A run that several have counts once, whatever their order: its
    directory knows more than wandb's copy, and of two directories or copies the one that is further on does.

    Args:
        by_target: points of different targets are never of one group.

    Raises UserError for one in which there is no run.
    """
    points: list[Point] = []
    notes = []
    for target, label in zip(targets, labels(targets), strict=True):
        place = Path(target).expanduser()
        silent = ask_record(place)[0] if os.path.exists(place / SWEEP_FILE) else {}
        found = _read(target, silent)
        notes += [one_line(why) for why in _damage_of_record(place)]
        if os.path.exists(place / SWEEP_FILE):
            notes += map(one_line, how_sweep_goes_on(place, [point.name for point in found], silent))
        for point in found:
            if len(targets) > 1:
                point.name = f"{label}/{point.name}"
            if by_target:
                point.swept = {TARGET: label, **point.swept}
        points += found
    kept, said = _each_once(points)
    return kept, [*notes, *said]


def _each_once(points: list[Point]) -> tuple[list[Point], list[str]]:
    """Of each run the point that knows most, in the place of the first; and what is left out."""
    best: dict[str, Point] = {}
    for point in points:
        if point.run_id and (point.run_id not in best or _knows(point) > _knows(best[point.run_id])):
            best[point.run_id] = point
    kept = [best[point.run_id] if point.run_id else point for point in points]
    left = [(point, best[point.run_id]) for point in points if point.run_id and best[point.run_id] is not point]
    same = [point for point, other in left if _agree(point, other)]
    notes = [
        f"{point.name} is left out: it is {other.name} at step {point.step} ({point.state}), which is here at step "
        f"{other.step} ({other.state})."
        for point, other in left
        if not _agree(point, other)
    ]
    if same:
        more = f" and {len(same) - SHOWN} more" * (len(same) > SHOWN)
        notes.append(
            f"Runs that were named twice count once; left out: {', '.join(p.name for p in same[:SHOWN])}{more}."
        )
    return list({id(point): point for point in kept}.values()), notes


def _knows(point: Point) -> tuple[bool, bool, int, int, bool]:
    """How much, for comparison with another record of the same run."""
    values = len(point.curves.held_out) + len(point.curves.training) if point.curves else 0
    return point.state != UNREADABLE, point.directory is not None, point.step, values, point.is_done


def _agree(point: Point, other: Point) -> bool:
    def said(of: Point) -> tuple[object, ...]:
        return of.step, of.curves and (of.curves.held_out, of.curves.training)

    return said(point) == said(other)


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
