"""The stage before the first rollout: a supervised job of its own tree, whose result is cached by its key."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prl.planning import warm_start_key
from prl.planning.run_plan import RunPlan, plan_to_json, warm_start_plan
from prl.runtime.status_file import StatusFile
from prl.runtime.supervisor import Household, Outcome, Supervisor

LOCK_POLL_S = 0.1


def warm_start(plan: RunPlan, run_dir: Path, home: Household) -> tuple[str | None, Outcome | None]:
    """Path of the checkpoint that the run starts from (None: no warm start), and the outcome of the stage if it ran.

    Two runs that need the same warm start at the same time compute it once: the second waits for the first.
    """
    stage = warm_start_plan(plan)
    if stage is None:
        return None, None
    cached = Path(plan.config.cache_dir).expanduser() / "warm_start" / warm_start_key(plan.config)
    if cached.is_dir():
        home.progress.note(f"warm start: cached, skipped ({cached})")
        return str(cached), None
    cached.parent.mkdir(parents=True, exist_ok=True)
    with _locked(cached.with_suffix(".lock"), home) as locked:
        if not locked:
            return None, Outcome("stopped", 0)
        if cached.is_dir():
            home.progress.note(f"warm start: made by another run meanwhile ({cached})")
            return str(cached), None
        outcome = _run_stage(stage, run_dir / "warm_start", home)
        if outcome.state == "done":
            _publish(run_dir / "warm_start" / "export", cached)
        return str(cached), outcome


def _run_stage(stage: RunPlan, stage_dir: Path, home: Household) -> Outcome:
    """The stage starts over after an interruption: it is short, and keeps no checkpoints."""
    shutil.rmtree(stage_dir, ignore_errors=True)
    stage_dir.mkdir()
    (stage_dir / "plan.json").write_text(plan_to_json(stage))
    home.progress.begin("warm start")
    status = StatusFile(stage_dir, stage.point_id, "sft", "warm_start", stage.config.max_steps)
    home.reaper.tell(f"status {status.path}")
    return Supervisor(stage, stage_dir, home, status).run()


def _publish(export: Path, cached: Path) -> None:
    """Into the cache by a rename, so that nobody ever sees half of it."""
    partial = cached.with_name(f"{cached.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.move(export, partial)
    os.rename(partial, cached)


@contextmanager
def _locked(path: Path, home: Household) -> Iterator[bool]:
    """Hold a file lock; yields False if a signal came while waiting."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        told = False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if home.signals.count:
                    yield False
                    return
                if not told:
                    home.progress.note("warm start: another run is making it; waiting")
                told = True
                time.sleep(LOCK_POLL_S)
        yield True
    finally:
        os.close(fd)
