"""A batch of points, from their names to their start: what is done is left alone, the rest runs here or on SLURM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.points import Point, PointState, freeze, make_points, record_points, state_of
from launch.settings import LauncherSettings
from launch.slurm_queue import is_configured
from launch.waiting import outcome, queued_points, wait_for
from prl.config.errors import ConfigError, PointFailedError, UserError

if TYPE_CHECKING:
    from prl.config.entry import Session


def launch_points(
    session: Session,
    batch: Sequence[tuple[str, ...]],
    sweep_dir: Path,
    settings: LauncherSettings,
    waits: bool,
) -> list[float | PointFailedError | None]:
    """Start what is missing of a batch.

    Args:
        waits: whether to return only when all points have ended, for a sweeper that goes on from their results. It may
            name a point twice.

    Returns: for each point its objective, or why it has none; None where nobody waits.
    """
    configs = session.configs_of(batch, sweep_dir)
    distinct = {config.output_dir: i for i, config in enumerate(configs)}.values() if waits else range(len(batch))
    points = make_points([batch[i] for i in distinct], [configs[i] for i in distinct])
    on_slurm = uses_slurm(settings, session)
    queued = queued_points(sweep_dir) if on_slurm else set()
    states = {point.path: state_of(point.path, queued) for point in points}
    todo = [point for point in points if is_to_start(states[point.path], settings)]
    if on_slurm:
        from launch.slurm import refuse_too_large

        refuse_too_large(todo)
    if settings.dry_run:
        from launch.dry_run import show

        show(points, states, todo, sweep_dir, settings, on_slurm)
        if waits:
            print("the sweeper chooses further points when these have results", flush=True)
            raise SystemExit(0)
        return [None] * len(points)
    _start(session, points, todo, states, sweep_dir, settings, on_slurm)
    if not waits:
        return [None] * len(points)
    results = _results(session, points, sweep_dir, on_slurm)
    return [results[str(config.output_dir)] for config in configs]


def _results(
    session: Session, points: list[Point], sweep_dir: Path, on_slurm: bool
) -> dict[str, float | PointFailedError]:
    """Of each point, by its directory, once all have ended."""
    try:
        wait_for([point.path for point in points], sweep_dir, on_slurm)
    except KeyboardInterrupt:
        print(f"no longer waiting; python -m prl.cancel {sweep_dir} stops what runs", file=sys.stderr)
        raise SystemExit(130) from None
    results = {str(point.path): outcome(point) for point in points}
    session.failed |= {path: 1 for path, value in results.items() if isinstance(value, PointFailedError)}
    return results


def _start(
    session: Session,
    points: list[Point],
    todo: list[Point],
    states: dict[Path, PointState],
    sweep_dir: Path,
    settings: LauncherSettings,
    on_slurm: bool,
) -> None:
    """Freeze and record the points, and start those that are to be."""
    left = [point for point in points if point not in todo]
    _tell_left(left, states)
    if session.is_frozen:
        record_points(sweep_dir, points)
        for point in todo:
            freeze(point)
    if on_slurm:
        from launch.slurm import submit

        submit(todo, sweep_dir, settings)
    else:
        from launch.local import run_points

        run_points(session, todo, settings)
    for point in left:
        if states[point.path] == "failed":
            session.failed[str(point.path)] = 1


def uses_slurm(settings: LauncherSettings, session: Session) -> bool:
    """Whether points go to SLURM. Raises ConfigError when they shall and cannot."""
    there = settings.mode != "local" and is_configured()
    if settings.mode == "slurm" and not there and not settings.dry_run:
        raise ConfigError(
            [
                UserError(
                    "There is no SLURM here.",
                    where="hydra/launcher",
                    why="sbatch is not on the PATH, or this machine belongs to no cluster",
                    fix="hydra/launcher=local, or submit from a login node; hydra.launcher.dry_run=true needs no SLURM",
                )
            ]
        )
    if settings.mode == "slurm" and not session.is_frozen:
        raise ConfigError(
            [
                UserError(
                    "This job cannot go to SLURM by itself.",
                    where="hydra/launcher=slurm",
                    why="only prl.rl, prl.sft and prl.bench can be started from a frozen plan",
                    fix="hydra/launcher=local, inside a job of your own (srun, salloc)",
                )
            ]
        )
    wanted = settings.mode == "slurm" or (settings.mode == "auto" and there)
    return wanted and session.is_frozen


def is_to_start(state: PointState, settings: LauncherSettings) -> bool:
    return state in ("missing", "unfinished") or (state == "failed" and settings.retry_failed)


def _tell_left(left: list[Point], states: dict[Path, PointState]) -> None:
    reasons = {
        "done": "done already",
        "active": "running or queued already",
        "failed": "failed before, and would again; hydra.launcher.retry_failed=true tries",
    }
    for point in left:
        print(f"{point.path.name}: {reasons[states[point.path]]}", file=sys.stderr, flush=True)
