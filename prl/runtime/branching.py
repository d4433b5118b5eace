"""A run that goes on from a checkpoint of another one: its first checkpoint is that one, in its own directory.

From there on it resumes as any run does, whatever becomes of the other. Files are linked where that is possible (nobody
writes into the files of a checkpoint), so that a hundred points of a sweep take no more space than one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from prl.config.branching import KEY, RECORD, absent, nothing_left
from prl.config.errors import UserError
from prl.config.other_run import nowhere
from prl.config.schema import RunConfig
from prl.runtime.directory import beginning
from prl.runtime.directory.checkpoints import (
    damage_of_step,
    latest_valid,
    parts_of,
    raise_if_full,
    staging_dir,
    step_dir,
    steps,
)
from prl.runtime.directory.files import move_away, read_object, replace_file, sync_directory

MOST_TRIES = 5


def first_checkpoint(config: RunConfig, run_dir: Path, note: Callable[[str], None]) -> int:
    """Have the checkpoint that `ckpt.from_run` and `ckpt.from_step` mean in `run_dir`. Returns its step.

    "last" is settled the first time: a run that starts over begins where it began before.

    Raises:
        UserError: where that run has no such checkpoint, or nothing is left to train behind it.
    """
    source = Path(str(config.ckpt.from_run))
    wanted = (read_object(run_dir / RECORD) or {}).get("step", config.ckpt.from_step)
    for tries_left in reversed(range(MOST_TRIES)):
        step = _find(config, source, wanted, note)
        if step >= config.max_steps:
            raise nothing_left(source, step, config.max_steps)
        _take_beginning(source, run_dir)
        replace_file(run_dir / RECORD, json.dumps({"run": str(source), "step": step}, indent=1) + "\n")
        try:
            _take(source, run_dir, step)
            break
        except FileNotFoundError as error:  # its run goes on, and has dropped it for a newer one
            if wanted != "last" or not tries_left:
                raise absent(source, step, steps(source)) from error
    note(f"going on from step {step} of {source}")
    return step


def first_step(run_dir: Path) -> int:
    """With the policy of which optimizer step a run began: 0 where it went on from no other."""
    step = (read_object(run_dir / RECORD) or {}).get("step")
    return step if isinstance(step, int) else 0


def told_origin(run_dir: Path) -> str | None:
    """In words, what a run went on from; None where it began afresh."""
    step = first_step(run_dir)
    return f"began with step {step} of {(read_object(run_dir / RECORD) or {}).get('run')}" if step else None


def _find(config: RunConfig, source: Path, wanted: object, note: Callable[[str], None]) -> int:
    parts = parts_of(config.job)
    if not source.is_dir():
        raise nowhere(KEY, source)
    if not isinstance(wanted, int):
        found = latest_valid(source, parts, note)
        if found is None:
            raise absent(source, "last", steps(source))
        return found[0]
    if wanted not in steps(source):
        raise absent(source, wanted, steps(source))
    damage = damage_of_step(source, wanted, parts)
    if damage is not None:
        raise UserError(
            f"The checkpoint of step {wanted} is damaged.",
            where=f"ckpt.from_run={source}, ckpt.from_step={wanted}",
            why=damage,
            fix="another ckpt.from_step; last is the newest that is intact",
        )
    return wanted


def _take_beginning(source: Path, run_dir: Path) -> None:
    """What the other run began with is what this one began with."""
    began = source / beginning.RECORD
    if not began.is_file():
        return
    if read_object(began) is None:
        raise UserError(
            f"{began} is damaged.",
            where=f"ckpt.from_run={source}",
            why="it says which weights the run began with, of which those that are not trained are read again",
            fix=f"bring it back from a copy; or, if all weights are trained: {move_away(began, 'damaged')}",
        )
    replace_file(run_dir / beginning.RECORD, began.read_text())


def begun_with(run_dir: Path) -> str | None:
    """Where the weights lie that the run began with from which this one goes on; None where it begins afresh, or they
    are not on this machine.
    """
    path = (read_object(run_dir / beginning.RECORD) or {}).get("path") if first_step(run_dir) else None
    return path if isinstance(path, str) and Path(path).is_dir() else None


def _take(source: Path, run_dir: Path, step: int) -> None:
    """Raises FileNotFoundError where the checkpoint is dropped meanwhile, UserError when the disk is full."""
    staged = staging_dir(run_dir, step)
    shutil.rmtree(staged)  # of an attempt that was killed
    try:
        _link(step_dir(source, step), staged)
        os.rename(staged, step_dir(run_dir, step))
    except OSError as error:
        shutil.rmtree(staged, ignore_errors=True)
        raise_if_full(error, run_dir, step)
        raise
    sync_directory(staged.parent)


def _link(source: Path, target: Path) -> None:
    """A directory's files, linked or copied."""
    target.mkdir()
    for entry in sorted(source.iterdir()):
        if entry.is_dir():
            _link(entry, target / entry.name)
            continue
        try:
            os.link(entry, target / entry.name)
        except FileNotFoundError:
            raise
        except OSError:  # another filesystem, or another's file, or one that knows no links
            shutil.copyfile(entry, target / entry.name)
