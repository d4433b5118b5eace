"""Results for sweepers that choose their next points by them: wait until points have ended, and say what came out."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path

from launch.points import Point
from launch.slurm_queue import live_jobs
from launch.states import is_taken, state_of
from launch.sweep_file import job_of_points, read_sweep
from prl.config.errors import ConfigError, PointFailedError, UserError
from prl.metrics.held_out import last_evaluation, lost_in
from prl.metrics.reader import read_rows
from prl.runtime.directory.files import read_object
from prl.runtime.directory.rundir import is_locked
from prl.runtime.directory.status_file import read_status

OBJECTIVE = {  # job -> role, metric
    "rl": ("orchestrator", "eval/reward"),
    "sft": ("trainer/0", "val_loss"),
    "eval": ("orchestrator", "eval/reward"),
}
POLL_S = 5.0
SERVER_POLL_S = 2.0
FRESH_S = 30.0  # older is what an attempt that was killed has left
PATIENCE_S = 600.0  # a controller that restarts answers again within minutes


def queued_points(sweep_dir: Path) -> set[Path]:
    """Points whose job waits or runs, a requeued one too. Raises UserError if SLURM does not answer."""
    jobs = job_of_points(read_sweep(sweep_dir))
    live = live_jobs(set(jobs.values()))
    return {sweep_dir / name for name, job in jobs.items() if job in live}


def wait_for(points: Collection[Path], sweep_dir: Path, on_slurm: bool) -> None:
    """Until none of the points waits or runs, wherever it was started from.

    Raises UserError when SLURM has not answered for PATIENCE_S.
    """
    answered = time.monotonic()
    while True:
        try:
            queued = queued_points(sweep_dir) if on_slurm else set()
            answered = time.monotonic()
        except UserError:
            if time.monotonic() - answered > PATIENCE_S:
                raise
            queued = set(points)
        if not any(path in queued or is_locked(path) or is_taken(path) for path in points):
            return
        time.sleep(POLL_S)


def urls_when_serving(path: Path) -> list[str]:
    """Where a submitted server is reached, once it is; nothing if its job has ended. Raises UserError as `wait_for`."""
    answered = time.monotonic()
    while True:
        try:
            is_queued = bool(queued_points(path))
            answered = time.monotonic()
        except UserError:
            if time.monotonic() - answered > PATIENCE_S:
                raise
            is_queued = True
        status = read_status(path)
        if not is_queued:
            return []
        if status.get("state") == "running" and status["urls"] and time.time() - status["updated"] < FRESH_S:
            return list(status["urls"])
        time.sleep(SERVER_POLL_S)


def refuse_without_objective(points: list[Point]) -> None:
    """Raises ConfigError for points that a sweeper is to learn from, and that will have no value."""
    for config in (point.config for point in points):
        wanted = config.eval
        has_none = {
            "rl": not wanted.interval or not (wanted.at_end or wanted.interval <= config.max_steps),
            "sft": config.sft is not None and not config.sft.val_interval,
        }.get(config.job, False)
        if has_none:
            raise ConfigError(
                [
                    UserError(
                        "A sweeper that learns from results would get none.",
                        where=f"hydra/sweeper, {'eval' if config.job == 'rl' else 'sft.val_interval=0'}",
                        why="a point's value is its last held-out "
                        + ("reward, and nothing is evaluated" if config.job == "rl" else "loss, which is not measured"),
                        fix="eval=default, or eval.interval=10" if config.job == "rl" else "sft.val_interval=10",
                    )
                ]
            )


def outcome(point: Point) -> float | PointFailedError:
    """The objective of a point that is done (RL: held-out reward, SFT: held-out loss, the last one; a
    trainer's benchmark: tokens/s per GPU), or why not.

    A value that it reached before it failed is none: what failed later must not look good.
    """
    status = read_status(point.path)
    if state_of(point.path) != "done":
        failure = status.get("failure") or {}
        why = f"{failure['class']}: {failure['message']}" if failure else f"it is {status.get('state', 'not started')}"
        return PointFailedError(f"{point.path.name} has no result.", where=str(point.path), why=why)
    rows = read_rows(point.path, "orchestrator") if point.config.job in ("rl", "eval") else []
    lost = lost_in(last_evaluation(rows))
    if lost is not None and lost.is_much:
        fix = f"{point.path / 'failures.jsonl'} says why they failed"
        return PointFailedError(
            f"{point.path.name} has no value to learn from.", where=str(point.path), why=str(lost), fix=fix
        )
    value = bench_value(point.path) if point.config.job == "bench" else last_value(point)
    if value is None:
        fix = "eval.interval=... for RL, sft.val_interval=... for SFT, bench.target=trainer_rl for a benchmark"
        return PointFailedError(f"{point.path.name} has no value to learn from.", where=str(point.path), fix=fix)
    return value


def last_value(point: Point) -> float | None:
    role, metric = OBJECTIVE[point.config.job]
    values = [row[metric] for row in read_rows(point.path, role) if isinstance(row.get(metric), (int, float))]
    return values[-1] if values else None


def bench_value(path: Path) -> float | None:
    result = (read_object(path / "result.json") or {}).get("result", {})
    return result.get("tokens_per_s_per_gpu")
