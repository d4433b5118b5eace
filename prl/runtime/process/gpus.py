"""The GPUs of this machine, as the driver counts them: whether they are enough for a plan that runs here alone."""

from __future__ import annotations

import os
from pathlib import Path

from prl.config.errors import UserError
from prl.planning.run_plan import RunPlan
from prl.planning.sharing import devices_taking_turns

GPUS = Path("/proc/driver/nvidia/gpus")  # one entry for each


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, or by number; without loading CUDA."""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    if count and outer is not None:
        return [name for name in outer.split(",") if name.strip()]
    return [str(number) for number in range(count)]


def gpus_needed(plan: RunPlan) -> int:
    """Of one machine that holds all nodes of a plan; the last node may have fewer than the others."""
    last = [max(role.devices) + 1 for role in plan.roles if role.devices and role.node == plan.num_nodes - 1]
    return (plan.num_nodes - 1) * plan.config.deployment.gpus_per_node + max(last, default=0)


def refuse_too_few_gpus(plan: RunPlan) -> None:
    """Raise UserError where all of a plan is to run on this machine, on GPUs, and it has too few for that."""
    found, deployment, needed = len(visible_gpus()), plan.config.deployment, gpus_needed(plan)
    several = plan.num_nodes > 1
    if found:
        enough = found >= needed or deployment.device == "cpu" or (deployment.device == "auto" and not several)
    else:  # not every driver tells how many there are
        enough = deployment.device != "cuda" or not several
    if enough:
        return
    turns = devices_taking_turns(plan)
    fixes = ["hydra/launcher=slurm, a smaller layout such as parallelism=single, or deployment.device=cpu"]
    if turns is not None and turns <= found:
        fixes.insert(0, "deployment=colocated (trainer and engines take turns on the same GPUs)")
    if several:
        raise UserError(
            f"{plan.num_nodes} nodes of {deployment.gpus_per_node} GPUs do not fit on this machine, which has {found}.",
            where=f"deployment.gpus_per_node={deployment.gpus_per_node}",
            why="without SLURM all nodes of a run are rehearsed on one machine",
            fix=", ".join(fixes),
        )
    raise UserError(
        f"{needed} GPUs are needed, and this machine has {found}.",
        where=f"deployment.device=cuda, deployment={deployment.type}",
        why="each trainer rank and each engine has one of its own",
        fix=", ".join(fixes),
    )


def roles_without_gpu(plan: RunPlan) -> list[str]:
    """Names of roles that run on the CPU, beside others on GPUs, because this machine has not enough for all."""
    found = len(visible_gpus())
    if plan.config.deployment.device != "auto" or not found or plan.num_nodes > 1:
        return []
    return [role.name for role in plan.roles if role.devices and max(role.devices) >= found]
