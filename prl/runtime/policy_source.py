"""The policy that `prl.eval` evaluates: a step of a run becomes a Hugging Face directory before engines start.

policy.json of the evaluation's directory says what was taken. A finished run's last step is its export; the first is
what it began with; any other is read from its checkpoint, by a process of its own, into the evaluation's directory.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.config.point import random_checkpoint_dir
from prl.config.schema import RunConfig
from prl.planning.run_plan import RolePlan, RunPlan, plan_from_json, plan_to_json
from prl.runtime.directory.checkpoints import TRAINER, find_damage, latest_valid, step_dir, steps
from prl.runtime.directory.files import read_object, replace_file
from prl.runtime.directory.status_file import StatusFile, read_status
from prl.runtime.supervisor import Household, Outcome, Supervisor
from prl.runtime.warm_cache import warm_start_dir

RESULT = "result.json"  # what an evaluation came to
SOURCE = "policy.json"
CONVERTED = "model"  # in the evaluation's directory, until it is done
STAGE = "policy"  # directory of the process that reads the checkpoint
READER = "prl.trainer.checkpoint_reader:main"


def prepare_policy(plan: RunPlan, run_dir: Path, home: Household) -> tuple[str | None, Outcome | None]:
    """Path of the weights that are evaluated (None: as model.path has them), and the outcome of reading a checkpoint,
    where that was needed. Raises UserError where the run has no such step.
    """
    config = plan.config
    if config.eval.run is None:
        return None, None
    run = Path(config.eval.run)
    step, path = find_policy(config)
    saved = step_dir(run, step) if path is None and step else path
    source = {"run": str(run), "step": step, "path": None if saved is None else str(saved)}
    replace_file(run_dir / SOURCE, json.dumps(source, indent=1) + "\n")
    home.progress.note(f"step {step} of {run}" + (f": {saved}" if saved else ", the model as it is made"))
    converted = run_dir / CONVERTED
    if path is not None or step == 0:
        return None if path is None else str(path), None
    if converted.is_dir():  # by an attempt that was interrupted
        return str(converted), None
    outcome = _run_stage(plan, run_dir / STAGE, home)
    return str(converted), outcome


def read_source(run_dir: Path) -> dict[str, Any]:
    """What `prepare_policy` told: run, step, path; nothing where the model came from elsewhere."""
    return read_object(run_dir / SOURCE) or {}


def drop_converted(run_dir: Path) -> None:
    """The evaluation is done: the checkpoint is still where it was."""
    shutil.rmtree(run_dir / CONVERTED, ignore_errors=True)


def find_policy(config: RunConfig) -> tuple[int, Path | None]:
    """The step that is meant, and where it lies as a Hugging Face directory; None: in a checkpoint alone."""
    run = Path(str(config.eval.run))
    plan = read_run(run)
    saved, status = steps(run), read_status(run)
    end = status.get("step") if status.get("state") == "done" else None
    is_exported = (run / "export" / "config.json").is_file()
    step = config.eval.step
    if step == "last":
        if end is not None and (is_exported or end in saved):
            step = int(end)
        else:
            found = latest_valid(run, (TRAINER,))
            step = found[0] if found else -1
    if step == end and is_exported:
        return step, run / "export"
    if step == 0:
        return 0, start_of(plan.config)
    damage = find_damage(step_dir(run, step), (TRAINER,)) if step in saved else ""
    if damage is not None:
        there = ", ".join(map(str, [0, *saved, *([end] if is_exported and end not in (None, *saved) else [])]))
        raise UserError(
            f"{run} has no checkpoint of step {step}." if not damage else f"The checkpoint of step {step} is damaged.",
            where=f"eval.run={run}, eval.step={config.eval.step}",
            why=damage or f"a run keeps its newest ckpt.keep checkpoints, and its export; here there are: {there}",
            fix=f"eval.step={saved[-1] if saved else 0}; later runs keep more with ckpt.interval and ckpt.keep",
        )
    return step, None


def read_run(run: Path) -> RunPlan:
    """The frozen plan of a run that trains. Raises UserError."""
    try:
        return plan_from_json((run / "plan.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{run} holds no run that can be read: {str(error).splitlines()[0]}",
            where=f"eval.run={run}",
            why="a run directory has a plan.json of this version",
            fix="eval.run=outputs/RUN; weights alone: model.path=DIRECTORY and their model=",
        ) from error


def start_of(config: RunConfig) -> Path | None:
    """Where the weights lie that a run began with, as far as they are on this machine; None: made from its card, or
    had from the hub.
    """
    if config.warm_start is not None:
        path = warm_start_dir(config)
        if not path.is_dir():
            raise UserError(
                "The weights that the run began with are not here.",
                where=f"cache_dir={config.cache_dir}",
                why=f"its warm start was kept in {path}",
                fix="the run's own command makes it again; or another eval.step",
            )
        return path
    if config.model.path is None:
        path = random_checkpoint_dir(config.model, config.cache_dir)
        return path if path.is_dir() else None
    return Path(config.model.path) if Path(config.model.path).is_dir() else None


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
