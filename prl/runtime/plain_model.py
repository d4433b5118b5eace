"""The stage before vLLM's engines start on a checkpoint that they would load in another form than they are sent.

A quantised checkpoint is, to vLLM, a model of quantised layers; the trainer dequantises it, and sends bfloat16 or
float32. The same holds for the text part of a larger model, whose tensors have other names there. So such a checkpoint
is written once as what the trainer holds, into cache_dir, and all roles begin with that.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

from prl.config.errors import UserError
from prl.config.hub import fetch_config_json
from prl.config.quantised import sends_weights, wants_a_copy
from prl.config.schema import RunConfig
from prl.planning.run_plan import RolePlan, RunPlan, plan_to_json
from prl.runtime.directory.files import read_object, replace_file
from prl.runtime.directory.intact import drop_damaged
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.made_once import claimed, partial_of, publish
from prl.runtime.supervisor import Household, Outcome, Supervisor
from prl.runtime.warm_cache import TARGET, plain_dir

STAGE = "plain_model"  # directory of the process that writes it
WRITER = "prl.trainer.plain_model:main"


def plain_model(
    plan: RunPlan, run_dir: Path, home: Household, status: StatusFile, source: str | None
) -> tuple[str | None, Outcome | None]:
    """Path of the weights that the run begins with, and the outcome of the stage if it ran.

    Args:
        source: where they lie; None: as model.path has them.
        status: of the run, shown to be up to date while it waits for another that writes the same.

    Raises:
        UserError: for a checkpoint that is quantised in a way that is not read.
    """
    directory = _directory_of(plan.config, source) if sends_weights(plan.config) else None
    config = None if directory is None else read_object(directory / "config.json")
    if directory is None or config is None or not wants_a_copy(plan.config, config, directory):
        return source, None
    cached = plain_dir(plan.config, directory)
    drop_damaged(cached, "weights as engines want them", home.progress.note)
    if cached.is_dir():
        home.progress.note(f"model.path: its weights as engines want them are in {cached}")
        return str(cached), None
    with claimed(cached, "weights as engines want them", run_dir, home, status) as (claim, outcome):
        if outcome is not None:
            return None, outcome
        if claim is None:
            return str(cached), None
        partial = partial_of(cached, claim)
        shutil.rmtree(partial, ignore_errors=True)
        home.progress.note(f"model.path: vLLM would load it in another form than it is sent; writing it to {cached}")
        outcome = _run_stage(plan, run_dir / STAGE, home, source, partial)
        if outcome.state == "done":
            publish(partial, cached, claim)
        else:
            shutil.rmtree(partial, ignore_errors=True)
        return str(cached), outcome


def _directory_of(config: RunConfig, source: str | None) -> Path | None:
    """Where its config.json is; None for random weights, and where the roles will say that it is not to be had."""
    name = source or config.model.path
    if name is None or Path(name).is_dir():
        return None if name is None else Path(name)
    try:
        return fetch_config_json(name).parent
    except UserError:
        return None


def _run_stage(plan: RunPlan, stage_dir: Path, home: Household, source: str | None, target: Path) -> Outcome:
    """Starts over after an interruption. One process, beside the root, on the host."""
    shutil.rmtree(stage_dir, ignore_errors=True)
    stage_dir.mkdir()
    replace_file(stage_dir / TARGET, json.dumps({"target": str(target)}) + "\n")
    wandb = plan.config.logging.wandb.model_copy(update={"mode": "disabled"})
    config = plan.config.model_copy(update={"logging": plan.config.logging.model_copy(update={"wandb": wandb})})
    own = home.nodes.seats[0].roles if home.nodes.seats else None  # of people who start roles by hand: the root's
    name = min(own) if own else "trainer/0"
    writer = RolePlan(role="trainer", index=0, name=name, node=0, devices=(), rank=0, local_rank=0, world_size=1)
    stage = plan.model_copy(update={"config": config, "roles": (writer,)})
    replace_file(stage_dir / "plan.json", plan_to_json(stage))
    home.progress.begin("writing weights as engines want them")
    status = StatusFile(stage_dir, stage.point_id, plan.config.job, STAGE, 1, home.presence.is_ours)
    home.reaper.tell(f"status {status.path}")
    entries = {"trainer": WRITER, "sft": WRITER}
    return Supervisor(stage, stage_dir, replace(home, entries=entries), status, 0, source).run()
