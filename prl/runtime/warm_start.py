"""The stage before the first rollout: a supervised job of its own tree, whose result is cached by its key."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prl.planning.planner import warm_start_plan
from prl.planning.run_plan import RunPlan, plan_to_json
from prl.runtime.directory.claims import Claim
from prl.runtime.directory.files import replace_file
from prl.runtime.directory.phases import SHARED, START, WARM_START
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.supervisor import Household, Outcome, Supervisor
from prl.runtime.warm_cache import warm_start_dir

LOOK_S = 0.2


def warm_start(plan: RunPlan, run_dir: Path, home: Household, status: StatusFile) -> tuple[str | None, Outcome | None]:
    """Path of the checkpoint that the run starts from (None: no warm start), and the outcome of the stage if it ran.

    Of several runs that need the same warm start at the same time, on one machine or several, one makes it and the
    others wait; should it fail, be stopped or killed, another one makes it.

    Args:
        status: of the run, shown to be up to date while it waits.
    """
    stage = warm_start_plan(plan)
    if stage is None:
        return None, None
    cached = warm_start_dir(plan.config)
    if cached.is_dir():
        home.progress.note(f"warm start: cached, skipped ({cached})")
        return str(cached), None
    cached.parent.mkdir(parents=True, exist_ok=True)
    with _claimed(cached, run_dir, home, status) as (claim, outcome):
        if outcome is not None:
            return None, outcome
        if claim is None:
            return str(cached), None
        home.hours.enter(WARM_START)
        outcome = _run_stage(stage, run_dir / "warm_start", home)
        if outcome.state == "done":
            _publish(run_dir / "warm_start" / "export", cached, claim)
        home.hours.enter(START)
        return str(cached), outcome


def _run_stage(stage: RunPlan, stage_dir: Path, home: Household) -> Outcome:
    """The stage starts over after an interruption: it is short, and keeps no checkpoints."""
    shutil.rmtree(stage_dir, ignore_errors=True)
    stage_dir.mkdir()
    replace_file(stage_dir / "plan.json", plan_to_json(stage))
    home.progress.begin("warm start")
    status = StatusFile(stage_dir, stage.point_id, "sft", "warm_start", stage.config.max_steps, home.presence.is_ours)
    home.reaper.tell(f"status {status.path}")
    return Supervisor(stage, stage_dir, home, status).run()


def _publish(export: Path, cached: Path, claim: Claim) -> None:
    """Into the cache by a rename, so that nobody ever sees half of it."""
    for left in cached.parent.glob(f"{cached.name}.partial-*"):  # by one who was killed over it
        shutil.rmtree(left, ignore_errors=True)
    partial = cached.with_name(f"{cached.name}.partial-{claim.number}")
    try:
        shutil.move(export, partial)
        os.rename(partial, cached)
    except OSError:
        if not cached.is_dir():  # else somebody has made the same meanwhile: see claims.py
            raise
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _claimed(
    cached: Path, run_dir: Path, home: Household, status: StatusFile
) -> Iterator[tuple[Claim | None, Outcome | None]]:
    """Until it is ours to make, or there. Yields our claim, or None where nothing is to be made, and how the run ends
    if it ends here.
    """
    claim, told = Claim(cached), None
    try:
        while not cached.is_dir() and not claim.take():
            failure = home.presence.find_loss() or home.nodes.find_lost(run_dir)
            if failure is not None or home.signals.count:
                yield None, Outcome("stopped" if failure is None else "failed", 0, failure)
                return
            if home.hours.phases.stage != SHARED:
                home.hours.enter(SHARED)
            status.update()
            home.hours.beat()
            if claim.holder and claim.holder.get("pid") != told:
                told = claim.holder.get("pid")
                home.progress.note(f"warm start: process {told} on {claim.holder.get('host')} is making it; waiting")
            time.sleep(LOOK_S)
        if cached.is_dir():  # also if it has just become ours: who had it before us was done
            home.progress.note(f"warm start: made by another run meanwhile ({cached})")
            yield None, None
        else:
            yield claim, None
    finally:
        if home.hours.phases.stage == SHARED:
            home.hours.enter(START)
        with contextlib.suppress(OSError):
            claim.release()
