"""The stage of `prl.eval` before its engines start: the policy as a Hugging Face directory.

What lies in a checkpoint alone is read by a process of its own, into the evaluation's directory.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from prl.planning.run_plan import RolePlan, RunPlan, plan_to_json
from prl.runtime.directory.checkpoints import step_dir, steps
from prl.runtime.directory.evaluation import CONVERTED, SOURCE, read_source
from prl.runtime.directory.files import replace_file
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.evaluated import note_evaluated
from prl.runtime.policy_source import find_policy
from prl.runtime.supervisor import Household, Outcome, Supervisor

STAGE = "policy"  # directory of the process that reads the checkpoint
READER = "prl.trainer.checkpoint_reader:main"
MOST_TRIES = 5


def prepare_policy(plan: RunPlan, run_dir: Path, home: Household) -> tuple[str | None, Outcome | None]:
    """Path of the weights that are evaluated (None: as model.path has them), and the outcome of reading a checkpoint,
    where that was needed. Raises UserError where the run has no such step.
    """
    config = plan.config
    note_evaluated(run_dir, config)
    if config.eval.run is None:
        return None, None
    for _ in range(MOST_TRIES - 1):
        found, outcome = _prepare(plan, run_dir, home)
        # the newest of a run that goes on may be dropped for a newer one while it is read
        if outcome is None or outcome.state != "failed" or config.eval.step != "last" or not _is_dropped(run_dir):
            return found, outcome
    return _prepare(plan, run_dir, home)


def _is_dropped(run_dir: Path) -> bool:
    source = read_source(run_dir)
    return source["step"] not in steps(Path(source["run"]))


def _prepare(plan: RunPlan, run_dir: Path, home: Household) -> tuple[str | None, Outcome | None]:
    """Once."""
    config = plan.config
    run = Path(str(config.eval.run))
    step, path = find_policy(config)
    saved = step_dir(run, step) if path is None and step else path
    source = {"run": str(run), "step": step, "path": None if saved is None else str(saved)}
    if read_source(run_dir) != source:  # of an attempt that was interrupted, when another step was the last
        drop_converted(run_dir)
    replace_file(run_dir / SOURCE, json.dumps(source, indent=1) + "\n")
    home.progress.note(f"step {step} of {run}" + (f": {saved}" if saved else ", the model as it is made"))
    converted = run_dir / CONVERTED
    if path is not None or step == 0:
        return None if path is None else str(path), None
    if converted.is_dir():  # by an attempt that was interrupted
        return str(converted), None
    outcome = _run_stage(plan, run_dir / STAGE, home)
    return str(converted), outcome


def drop_converted(run_dir: Path) -> None:
    """The evaluation is done: the checkpoint is still where it was."""
    shutil.rmtree(run_dir / CONVERTED, ignore_errors=True)


def _run_stage(plan: RunPlan, stage_dir: Path, home: Household) -> Outcome:
    """Starts over after an interruption."""
    shutil.rmtree(stage_dir, ignore_errors=True)
    stage_dir.mkdir()
    wandb = plan.config.logging.wandb.model_copy(update={"mode": "disabled"})
    config = plan.config.model_copy(update={"logging": plan.config.logging.model_copy(update={"wandb": wandb})})
    reader = RolePlan(role="trainer", index=0, name="trainer/0", node=0, devices=(), rank=0, local_rank=0, world_size=1)
    stage = plan.model_copy(update={"config": config, "roles": (reader,)})
    replace_file(stage_dir / "plan.json", plan_to_json(stage))
    home.progress.begin("reading the checkpoint")
    status = StatusFile(stage_dir, stage.point_id, "eval", STAGE, 1, home.presence.is_ours)
    home.reaper.tell(f"status {status.path}")
    return Supervisor(stage, stage_dir, replace(home, entries={"trainer": READER}), status).run()
