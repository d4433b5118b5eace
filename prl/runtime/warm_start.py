"""The stage before the first rollout: a supervised job of its own tree, whose result is cached by its key."""

from __future__ import annotations

import shutil
from pathlib import Path

from prl.config.point import random_checkpoint_dir
from prl.planning.planner import warm_start_plan
from prl.planning.run_plan import RunPlan, plan_to_json
from prl.runtime.directory.files import replace_file
from prl.runtime.directory.intact import drop_damaged
from prl.runtime.directory.phases import START, WARM_START
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.made_once import claimed, publish
from prl.runtime.supervisor import Household, Outcome, Supervisor
from prl.runtime.warm_cache import warm_start_dir


def warm_start(plan: RunPlan, run_dir: Path, home: Household, status: StatusFile) -> tuple[str | None, Outcome | None]:
    """Path of the checkpoint that the run starts from (None: no warm start), and the outcome of the stage if it ran.

    Of several runs that need the same warm start at the same time, on one machine or several, one makes it and the
    others wait; should it fail, be stopped or killed, another one makes it.

    Args:
        status: of the run, shown to be up to date while it waits.
    """
    stage = warm_start_plan(plan)
    if stage is None:
        _look_at_random_weights(plan, home)
        return None, None
    cached = warm_start_dir(plan.config)
    drop_damaged(cached, "warm start", home.progress.note)
    if cached.is_dir():
        home.progress.note(f"warm start: cached, skipped ({cached})")
        return str(cached), None
    with claimed(cached, "warm start", run_dir, home, status) as (claim, outcome):
        if outcome is not None:
            return None, outcome
        if claim is None:
            return str(cached), None
        _look_at_random_weights(plan, home)
        home.hours.enter(WARM_START)
        outcome = _run_stage(stage, run_dir / "warm_start", home)
        if outcome.state == "done":
            publish(run_dir / "warm_start" / "export", cached, claim)
        home.hours.enter(START)
        return str(cached), outcome


def _look_at_random_weights(plan: RunPlan, home: Household) -> None:
    """Where the next stage begins with what an earlier run has made from the card."""
    model = plan.config.model
    if model.path is None:
        drop_damaged(random_checkpoint_dir(model, plan.config.cache_dir), "random weights", home.progress.note)


def _run_stage(stage: RunPlan, stage_dir: Path, home: Household) -> Outcome:
    """The stage starts over after an interruption: it is short, and keeps no checkpoints."""
    shutil.rmtree(stage_dir, ignore_errors=True)
    stage_dir.mkdir()
    replace_file(stage_dir / "plan.json", plan_to_json(stage))
    home.progress.begin("warm start")
    status = StatusFile(stage_dir, stage.point_id, "sft", "warm_start", stage.config.max_steps, home.presence.is_ours)
    home.reaper.tell(f"status {status.path}")
    return Supervisor(stage, stage_dir, home, status).run()
