"""Rules about devices and nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.rules.rule import Refuse, each_of, first_of, next_divisor
from prl.config.schema import RunConfig
from prl.config.world import World

gpus_suffice = Refuse(
    # others go on to further nodes
    lambda c, w: (
        c.deployment.device == "cuda"
        and c.deployment.type == "colocated"
        and max(w.ranks, w.engine_devices) > c.deployment.gpus_per_node
    ),
    lambda c, w: f"{max(w.ranks, w.engine_devices)} GPUs are needed and a node has {c.deployment.gpus_per_node}.",
    where="{deployment.gpus_per_node=}",
    why="{world.ranks} for training and {world.engine_devices} for inference, which share the GPUs of one node",
    fix=lambda c, w: (
        f"deployment.gpus_per_node={max(w.ranks, w.engine_devices)}, "
        "deployment=disaggregated, or less, as with parallelism=single"
    ),
)


def gpu_ids_fit(config: RunConfig, world: World) -> Iterator[UserError]:
    """Each process has one of its own among those named for its kind; trainer and engines share only to take turns."""
    deployment = config.deployment
    if world.spans_nodes:
        return
    infer, train = world.infer_gpu_ids, world.train_gpu_ids
    if misnamed := [*_misnamed(config, world, "infer_gpu_ids"), *_misnamed(config, world, "train_gpu_ids")]:
        yield from misnamed
        return
    if deployment.type == "colocated" and not set(infer) <= set(train):
        yield UserError(
            "Engines would have devices that the trainer has not.",
            where=f"deployment.infer_gpu_ids={as_override(infer)}, deployment.type=colocated",
            why=f"they share the trainer's own, {as_override(train)}",
            fix="deployment.infer_gpu_ids=null" + ("" if set(infer) & set(train) else ", or deployment=disaggregated"),
        )
    if deployment.type == "disaggregated" and set(infer) & set(train):
        yield UserError(
            "Engines and trainer would be on the same devices.",
            where=f"deployment.infer_gpu_ids={as_override(infer)}, deployment.train_gpu_ids={as_override(train)}",
            why="deployment.type=disaggregated gives each its own",
            fix="deployment.train_gpu_ids=null" + (", or deployment=colocated" if set(infer) <= set(train) else ""),
        )


def _misnamed(config: RunConfig, world: World, key: Literal["infer_gpu_ids", "train_gpu_ids"]) -> Iterator[UserError]:
    """Of one of both keys: more or fewer devices than it has processes for, and devices that no node has."""
    deployment, of_engines = config.deployment, key == "infer_gpu_ids"
    given = deployment.infer_gpu_ids if of_engines else deployment.train_gpu_ids
    needed = world.engine_devices if of_engines else world.ranks
    if given is None or not needed:
        return
    said, several = f"deployment.{key}={as_override(given)}", "s" if needed > 1 else ""
    if len(given) != needed or len(set(given)) != len(given):
        fix = f"deployment.{key}=null, or {f'{needed} different numbers' if several else 'one number'}"
        if len(set(given)) == len(given) and (_engines_fill if of_engines else _ranks_fill)(config, world, len(given)):
            fix = f"deployment.num_{'infer' if of_engines else 'train'}_gpus={len(given)}, or {fix}"
        what = f"{said} does not name {needed} device{several}."
        yield UserError(what, where=said, why="one for each process", fix=fix)
    per_node = deployment.gpus_per_node
    beyond = [str(device) for device in given if device >= per_node]
    if beyond and deployment.device != "cpu":  # CPU slots are as many as one likes
        devices = f"devices {', '.join(beyond)}" if len(beyond) > 1 else f"device {beyond[0]}"
        yield UserError(
            f"deployment.{key} names {devices}, and a node has {per_node}.",
            where=f"{said}, deployment.gpus_per_node={per_node}",
            why=f"devices of a node are counted from 0: the last is {per_node - 1}",
            fix=f"deployment.{key}=null, or deployment.gpus_per_node={1 + max(given)}",
        )


def _engines_fill(config: RunConfig, world: World, devices: int) -> bool:
    """Whether whole engines take so many devices, had they so many, on one node."""
    inference = config.inference
    if inference.pd.num_prefill_gpus or devices == 0 or devices % (inference.tp * inference.dp):
        return False
    shared = config.deployment.type == "colocated"
    return devices <= world.ranks if shared else _one_node_has(config, devices + world.ranks)


def _ranks_fill(config: RunConfig, world: World, devices: int) -> bool:
    """Whether a mesh of this parallelism takes so many devices, had the trainer so many, on one node."""
    parallelism, replicas = config.parallelism, world.mesh.dp_replicate
    if parallelism.dp_shard != "auto" or devices == 0 or devices % (replicas * world.mesh.cp):
        return False
    shared = config.deployment.type == "colocated"
    return (parallelism.ep == "auto" or devices // replicas % parallelism.ep == 0) and (
        devices >= world.engine_devices if shared else _one_node_has(config, devices + world.engine_devices)
    )


def _one_node_has(config: RunConfig, devices: int) -> bool:
    return config.deployment.device == "cpu" or devices <= config.deployment.gpus_per_node


nobody_takes_turns = Refuse(
    lambda c, w: c.deployment.type == "colocated" and w.samples and not w.has_trainers,
    "There is no trainer to take turns with.",
    where=lambda c, w: f"deployment.type=colocated, {'bench.target=inference' if c.bench else f'job={c.job}'}",
    why="this job has engines alone",
    fix="deployment=disaggregated",
)

overlapping_engines_fit = each_of(
    Refuse(
        lambda c, w: c.algo.max_off_policy_steps == 0,
        "A synchronous run has nothing to overlap.",
        where="{deployment.infer_memory_fraction=:g}, {algo.max_off_policy_steps=}",
        why="its engines wait for the weights of each step before they generate the next",
        fix="deployment.infer_memory_fraction=null, or algo.max_off_policy_steps=1",
    ),
    Refuse(
        lambda c, w: "gpu_memory_utilization" in c.inference.vllm,
        "The engine's part of a GPU is said twice.",
        where="{deployment.infer_memory_fraction=:g}, "
        "inference.vllm.gpu_memory_utilization={inference.vllm[gpu_memory_utilization]!s}",
        why="the trainer must know it, too, and keep to what is left",
        fix="deployment.infer_memory_fraction={inference.vllm[gpu_memory_utilization]!s} without "
        "inference.vllm.gpu_memory_utilization",
    ),
    # engines that go on beside the trainer, on its GPUs
    given=lambda c, w: c.deployment.type == "colocated" and not w.takes_turns,
)

fsdp_groups_need_nodes = first_of(
    Refuse(
        lambda c, w: c.deployment.type != "multi_node",
        "nodes_per_fsdp_group has no meaning on one node.",
        where="{deployment.nodes_per_fsdp_group=}",
        why="it cuts the training nodes into FSDP islands",
        fix="deployment.nodes_per_fsdp_group=null",
    ),
    Refuse(
        lambda c, w: c.deployment.num_train_nodes % (c.deployment.nodes_per_fsdp_group or 1),
        "{deployment.num_train_nodes} training nodes cannot be cut into islands of {deployment.nodes_per_fsdp_group}.",
        where="{deployment.nodes_per_fsdp_group=}",
        why="it must divide num_train_nodes",
        fix=lambda c, w: (
            "deployment.nodes_per_fsdp_group="
            f"{next_divisor(c.deployment.nodes_per_fsdp_group or 1, c.deployment.num_train_nodes)}"
        ),
    ),
    Refuse(
        lambda c, w: c.parallelism.dp_replicate not in (1, "auto", w.mesh.dp_replicate),
        "The weights cannot have both {parallelism.dp_replicate} and {world.mesh.dp_replicate} replicas.",
        where="{parallelism.dp_replicate=}, {deployment.nodes_per_fsdp_group=}, {deployment.num_train_nodes=}",
        why="nodes_per_fsdp_group sets dp_replicate to num_train_nodes / nodes_per_fsdp_group",
        fix="parallelism.dp_replicate={world.mesh.dp_replicate}, or deployment.nodes_per_fsdp_group=null",
    ),
    given=lambda c, w: c.deployment.nodes_per_fsdp_group is not None,
)


def sbatch_lines_are_options(config: RunConfig, world: World) -> Iterator[UserError]:
    """`slurm.sbatch` adds to what the launcher asks for; the array is the launcher's."""
    lines = config.slurm.sbatch or ()
    for line in lines:
        word = re.split(r"[=\s]", line, maxsplit=1)[0]
        if word.startswith("-") and word not in ("--array", "-a"):
            continue
        others = [other for other in lines if other != line]
        yield UserError(
            f"{line!r} cannot be a line of slurm.sbatch.",
            where=f"slurm.sbatch={as_override(list(lines))}",
            why="the launcher makes the arrays: one element for each point"
            if word.startswith("-")
            else "each line is one option as sbatch takes it, and the script puts #SBATCH before it",
            fix=f"slurm.sbatch={as_override(others) if others else 'null'}",
        )
