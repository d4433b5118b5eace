"""Where the policy lies that `prl.eval` is to evaluate: a step of a run, by eval.run and eval.step.

A finished run's last step is its export; the first is what it began with; any other is in a checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from prl.config.errors import UserError
from prl.config.point import random_checkpoint_dir
from prl.config.schema import RunConfig
from prl.planning.run_plan import RunPlan, plan_from_json
from prl.runtime.directory.checkpoints import TRAINER, damage_of_step, latest_valid, steps
from prl.runtime.directory.status_file import read_status
from prl.runtime.warm_cache import warm_start_dir

NO_STEP = -1  # the last of a run that has none


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
            step = found[0] if found else NO_STEP
    if step == end and is_exported:
        return step, run / "export"
    if step == 0:
        return 0, start_of(plan.config)
    damage = damage_of_step(run, step, (TRAINER,)) if step in saved else ""
    if damage is None:
        return step, None
    there = ", ".join(map(str, [0, *saved, *([end] if is_exported and end not in (None, *saved) else [])]))
    instead = _instead(run, end if is_exported else None, step)
    raise UserError(
        f"The checkpoint of step {step} is damaged." if damage else f"{run} has no checkpoint {_named(step)}.",
        where=f"eval.run={run}, eval.step={config.eval.step}",
        why=damage or f"a run keeps its newest ckpt.keep checkpoints, and its export; here there are: {there}",
        fix=f"{instead}; later runs keep more with ckpt.interval and ckpt.keep",
    )


def _named(step: int) -> str:
    return "that is intact" if step == NO_STEP else f"of step {step}"


def _instead(run: Path, exported: int | None, step: int) -> str:
    """What can be evaluated where this step cannot: of the other checkpoints that from which a run would resume."""
    if exported is not None:
        return f"eval.step={exported}"
    found = None if step == NO_STEP else latest_valid(run, (TRAINER,), besides=step)
    if found is not None:
        return f"eval.step={found[0]}"
    return "eval.step=0, which it began with: no other checkpoint is intact"


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
