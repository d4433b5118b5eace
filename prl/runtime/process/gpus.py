"""The GPUs of this machine, as the driver counts them: whether they are enough for a plan that runs here alone."""

from __future__ import annotations

import glob
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.rules import violations
from prl.config.schema import ParallelismConfig
from prl.planning.planner import make_plan
from prl.planning.run_plan import RunPlan
from prl.planning.sharing import devices_taking_turns

SINGLE = ParallelismConfig(dp_shard=1, ep=1)  # conf/parallelism/single.yaml
DEVICES = ("/dev/nvidia[0-9]*", "/dev/dxg")  # where the driver is outside of a container; on WSL
BETWEEN_GPUS = ("nccl", "ipc")
NONE_AVAILABLE = 3  # exit code
ASK_TORCH_S = 60.0
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
    if (found := too_few_gpus(plan)) is not None:
        raise found


def too_few_gpus(plan: RunPlan) -> UserError | None:
    """That this machine has not the GPUs for all of a plan, which is to run on it; None where they suffice."""
    found, deployment, needed = len(visible_gpus()), plan.config.deployment, gpus_needed(plan)
    several = plan.num_nodes > 1
    if found:
        beside = deployment.device == "auto" and not several and not _splits(plan, found)
        enough = found >= needed or deployment.device == "cpu" or beside
    else:  # not every driver tells how many there are
        enough = deployment.device != "cuda" or not several
    if enough:
        return None
    fixes = "; ".join(_remedies(plan, found))
    if several:
        return UserError(
            f"{plan.num_nodes} nodes of {deployment.gpus_per_node} GPUs do not fit on this machine, which has {found}.",
            where=f"deployment.gpus_per_node={deployment.gpus_per_node}",
            why="without SLURM all nodes of a run are rehearsed on one machine",
            fix=fixes,
        )
    return UserError(
        f"{needed} GPUs are needed, and this machine has {found}.",
        where=", ".join(
            [
                f"deployment.device={deployment.device}",
                *(_named_beyond(plan, found) or [f"deployment={deployment.type}"]),
            ]
        ),
        why="each trainer rank and each engine has one of its own"
        if deployment.device == "cuda"
        else "ranks that compute together are all on GPUs, or none of them",
        fix=fixes,
    )


def _splits(plan: RunPlan, found: int) -> bool:
    """Whether of ranks that compute together (the trainer's, or an engine's) some would have a GPU, others none."""
    together = [[device for role in plan.roles_of("trainer") for device in role.devices]]
    together += [list(role.devices) for role in plan.roles_of("inference")]
    return any(min(devices) < found <= max(devices) for devices in together if devices)


def _remedies(plan: RunPlan, found: int) -> Iterator[str]:
    """Those that work for this plan on a machine with so many GPUs."""
    config = plan.config
    deployment = config.deployment
    turns = devices_taking_turns(plan)
    if named := _named_beyond(plan, found):
        lowest = deployment.model_copy(update={"infer_gpu_ids": None, "train_gpu_ids": None})
        if gpus_needed(make_plan(config.model_copy(update={"deployment": lowest}))) <= found:
            yield " ".join(f"{word.partition('=')[0]}=null" for word in named)
    if turns is not None and turns <= found:
        keys = [key for key in ("infer_gpu_ids", "train_gpu_ids") if getattr(deployment, key)]
        unnamed = [f"deployment.{key}=null" for key in keys]
        yield " ".join(["deployment=colocated", *unnamed]) + " (trainer and engines take turns on the same GPUs)"
    single = config.model_copy(update={"parallelism": SINGLE})
    smaller = deployment.type != "multi_node" and config.parallelism != SINGLE and not violations(single)
    if smaller and (deployment.device != "cuda" or gpus_needed(make_plan(single)) <= found):
        yield "parallelism=single, a smaller layout"
    if config.model.path is None:  # checkpoints of people have sizes that CPUs do not train
        device = deployment.model_copy(update={"device": "cpu"})
        transport, also = config.weight_transport, ""
        if transport.type in BETWEEN_GPUS:
            transport, also = transport.model_copy(update={"type": "filesystem"}), " weight_transport=filesystem"
        if not violations(config.model_copy(update={"deployment": device, "weight_transport": transport})):
            yield f"deployment.device=cpu{also}"
    yield "on a login node of a cluster: hydra/launcher=slurm"
    yield "hydra/launcher=slurm hydra.launcher.dry_run=true, which starts nothing and shows what a cluster would get"


def _named_beyond(plan: RunPlan, found: int) -> list[str]:
    """Keys that name devices beyond the first so many, as overrides."""
    deployment = plan.config.deployment
    given = {"infer_gpu_ids": deployment.infer_gpu_ids, "train_gpu_ids": deployment.train_gpu_ids}
    named = {key: ids for key, ids in given.items() if ids and max(ids) >= found}
    return [f"deployment.{key}={as_override(ids)}" for key, ids in named.items()]


def no_usable_gpus(plan: RunPlan) -> UserError | None:
    """That the plan's roles here are to have GPUs, and torch can use none on this machine; None where it may."""
    config = plan.config
    by_ipc = config.job == "rl" and config.weight_transport.type == "ipc" and config.deployment.device != "cuda"
    if not (by_ipc or config.deployment.device == "cuda") or (why := _why_torch_has_none()) is None:
        return None
    what = "torch cannot use the GPUs of this machine." if _signs() else "There is no sign of a GPU on this machine."
    needed = gpus_needed(plan)
    if by_ipc:
        why = f"it moves weights within a GPU, and {why}"
        return UserError(what, where="weight_transport=ipc", why=why, fix="weight_transport=shared_memory")
    return UserError(
        what,
        where="deployment.device=cuda",
        why=(f"{needed} are needed, and " if needed > 1 else "one is needed, and ") + why,
        fix="; ".join([*_remedies(plan, 0), "python -m prl.doctor deployment.device=cuda says what is missing"]),
    )


def _signs() -> bool:
    return GPUS.is_dir() or any(map(glob.glob, DEVICES))


def _why_torch_has_none() -> str | None:
    """By its build, without importing it; asked itself, which takes seconds, only where there is no sign of a GPU. With
    a driver that is none for this torch, the roles are told.
    """
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        built = (Path(spec.submodule_search_locations[0]) / "version.py").read_text()
    except OSError:
        return None
    platforms = re.findall(r"^(?:cuda|hip)\b[^=\n]*= *(.+)$", built, re.MULTILINE)
    if platforms and all(value.strip() == "None" for value in platforms):
        return "torch is built without CUDA"
    return None if _signs() or _torch_finds_gpus() else "torch.cuda.is_available() is false"


def _torch_finds_gpus() -> bool:
    """Also where it cannot be asked: not enough to refuse."""
    asked = [sys.executable, "-c", f"import sys, torch; sys.exit(0 if torch.cuda.is_available() else {NONE_AVAILABLE})"]
    try:
        return subprocess.run(asked, capture_output=True, timeout=ASK_TORCH_S, check=False).returncode != NONE_AVAILABLE
    except (OSError, subprocess.TimeoutExpired):
        return True


def roles_without_gpu(plan: RunPlan) -> list[str]:
    """Names of roles that run on the CPU, beside others on GPUs, because this machine has not enough for all."""
    found = len(visible_gpus())
    if plan.config.deployment.device != "auto" or not found or plan.num_nodes > 1:
        return []
    return [role.name for role in plan.roles if role.devices and max(role.devices) >= found]
