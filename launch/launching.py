"""A batch of points, from their names to their start: what is done is left alone, the rest runs here or on SLURM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch.points import Point, PointState, freeze, job_of_points, make_points, read_sweep, record_points, state_of
from launch.settings import LauncherSettings
from launch.slurm_queue import is_configured
from prl.config.errors import ConfigError, UserError
from prl.metrics.reader import read_rows

if TYPE_CHECKING:
    from prl.config.entry import Session

OBJECTIVE = {"rl": ("orchestrator", "eval/reward"), "sft": ("trainer/0", "val_loss")}  # job -> role, metric


def launch_points(
    session: Session,
    batch: Sequence[tuple[str, ...]],
    sweep_dir: Path,
    settings: LauncherSettings,
    waits: bool,
) -> list[float | None]:
    """Start what is missing of a batch.

    Args:
        waits: whether to return only when all points have ended, as here they always do.

    Returns: for each point its objective (RL: held-out reward, SFT: held-out loss, the last one), None without one.
    """
    points = make_points(batch, session.configs_of(batch, sweep_dir))
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
        return [None] * len(points)
    left = [point for point in points if point not in todo]
    _tell_left(left, states)
    if session.is_frozen:
        record_points(sweep_dir, points)
        for point in todo:
            freeze(point)
    if on_slurm:
        from launch.slurm import submit, wait_for

        jobs = submit(todo, sweep_dir, settings)
        if waits:
            wait_for(jobs)
    else:
        from launch.local import run_points

        run_points(session, todo, settings)
    for point in left:
        if states[point.path] == "failed":
            session.failed[str(point.path)] = 1
    return [objective(point) for point in points]


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
                    why="only prl.rl and prl.sft can be started from a frozen plan",
                    fix="hydra/launcher=local, inside a job of your own (srun, salloc)",
                )
            ]
        )
    wanted = settings.mode == "slurm" or (settings.mode == "auto" and there)
    return wanted and session.is_frozen


def is_to_start(state: PointState, settings: LauncherSettings) -> bool:
    return state in ("missing", "unfinished") or (state == "failed" and settings.retry_failed)


def queued_points(sweep_dir: Path) -> set[Path]:
    """Points whose job waits or runs, as SLURM has it."""
    from launch.slurm_queue import live_jobs

    jobs = job_of_points(read_sweep(sweep_dir))
    live = live_jobs(set(jobs.values()))
    return {sweep_dir / name for name, job in jobs.items() if job in live}


def _tell_left(left: list[Point], states: dict[Path, PointState]) -> None:
    reasons = {
        "done": "done already",
        "active": "running or queued already",
        "failed": "failed before, and would again; hydra.launcher.retry_failed=true tries",
    }
    for point in left:
        print(f"{point.path.name}: {reasons[states[point.path]]}", file=sys.stderr, flush=True)


def objective(point: Point) -> float | None:
    """What a sweeper that learns from results is given."""
    if point.config.job not in OBJECTIVE:
        return None
    role, metric = OBJECTIVE[point.config.job]
    values = [row[metric] for row in read_rows(point.path, role) if isinstance(row.get(metric), (int, float))]
    return values[-1] if values else None
