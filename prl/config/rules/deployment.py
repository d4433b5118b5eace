"""Rules about devices and nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.rules.rule import next_divisor
from prl.config.schema import RunConfig
from prl.config.world import gpu_ids, has_engines, has_trainers, infer_devices, resolve_world, spans_nodes


def gpus_suffice(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    if deployment.device != "cuda" or deployment.type != "colocated":  # others go on to further nodes
        return
    train = resolve_world(config).size if has_trainers(config) else 0
    infer = deployment.num_infer_gpus if has_engines(config) else 0
    needed = max(train, infer)
    if needed > deployment.gpus_per_node:
        yield UserError(
            f"{needed} GPUs are needed and a node has {deployment.gpus_per_node}.",
            where=f"deployment.gpus_per_node={deployment.gpus_per_node}",
            why=f"{train} for training and {infer} for inference, which share the GPUs of one node",
            fix=f"deployment.gpus_per_node={needed}, deployment=disaggregated, or less, as with parallelism=single",
        )


def gpu_ids_fit(config: RunConfig) -> Iterator[UserError]:
    """Each process has one of its own among those named for its kind; trainer and engines share only to take turns."""
    deployment = config.deployment
    if spans_nodes(config):
        return
    infer, train = gpu_ids(config)
    engines = infer_devices(config) if has_engines(config) else 0
    ranks = resolve_world(config).size if has_trainers(config) else 0
    for key, given, needed in (
        ("infer_gpu_ids", deployment.infer_gpu_ids, engines),
        ("train_gpu_ids", deployment.train_gpu_ids, ranks),
    ):
        if given is None or not needed:
            continue
        right = f"deployment.{key}=null, or {needed} different numbers"
        if len(given) != needed or len(set(given)) != len(given):
            said = f"deployment.{key}={as_override(given)}"
            yield UserError(
                f"{said} does not name {needed} devices.", where=said, why="one for each process", fix=right
            )
            return
    if deployment.type == "colocated" and not set(infer) <= set(train):
        yield UserError(
            "Engines would have devices that the trainer has not.",
            where=f"deployment.infer_gpu_ids={as_override(tuple(infer))}, deployment.type=colocated",
            why=f"they share the trainer's own, {as_override(tuple(train))}",
            fix="deployment.infer_gpu_ids=null, or deployment=disaggregated",
        )
    if deployment.type == "disaggregated" and set(infer) & set(train):
        yield UserError(
            "Engines and trainer would be on the same devices.",
            where=f"deployment.infer_gpu_ids={as_override(tuple(infer))}, "
            f"deployment.train_gpu_ids={as_override(tuple(train))}",
            why="deployment.type=disaggregated gives each its own",
            fix="deployment.train_gpu_ids=null, or deployment=colocated",
        )


def overlapping_engines_fit(config: RunConfig) -> Iterator[UserError]:
    """Engines that go on beside the trainer, on its GPUs: deployment.infer_memory_fraction."""
    part, inference = config.deployment.infer_memory_fraction, config.inference
    if part is None or config.deployment.type != "colocated":
        return
    where = f"deployment.infer_memory_fraction={part:g}"
    if config.algo.max_off_policy_steps == 0:
        yield UserError(
            "A synchronous run has nothing to overlap.",
            where=f"{where}, algo.max_off_policy_steps=0",
            why="its engines wait for the weights of each step before they generate the next",
            fix="deployment.infer_memory_fraction=null, or algo.max_off_policy_steps=1",
        )
    if "gpu_memory_utilization" in inference.vllm:
        said = inference.vllm["gpu_memory_utilization"]
        yield UserError(
            "The engine's part of a GPU is said twice.",
            where=f"{where}, inference.vllm.gpu_memory_utilization={said}",
            why="the trainer must know it, too, and keep to what is left",
            fix=f"deployment.infer_memory_fraction={said} without inference.vllm.gpu_memory_utilization",
        )


def fsdp_groups_need_nodes(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    group = deployment.nodes_per_fsdp_group
    if group is None:
        return
    if deployment.type != "multi_node":
        yield UserError(
            "nodes_per_fsdp_group has no meaning on one node.",
            where=f"deployment.nodes_per_fsdp_group={group}",
            why="it cuts the training nodes into FSDP islands",
            fix="deployment.nodes_per_fsdp_group=null",
        )
    elif deployment.num_train_nodes % group:
        yield UserError(
            f"{deployment.num_train_nodes} training nodes cannot be cut into islands of {group}.",
            where=f"deployment.nodes_per_fsdp_group={group}",
            why="it must divide num_train_nodes",
            fix=f"deployment.nodes_per_fsdp_group={next_divisor(group, deployment.num_train_nodes)}",
        )
    elif config.parallelism.dp_replicate not in (1, deployment.num_train_nodes // group):
        replicas = deployment.num_train_nodes // group
        yield UserError(
            f"The weights cannot have both {config.parallelism.dp_replicate} and {replicas} replicas.",
            where=f"parallelism.dp_replicate={config.parallelism.dp_replicate}, "
            f"deployment.nodes_per_fsdp_group={group}, deployment.num_train_nodes={deployment.num_train_nodes}",
            why="nodes_per_fsdp_group sets dp_replicate to num_train_nodes / nodes_per_fsdp_group",
            fix=f"parallelism.dp_replicate={replicas}, or deployment.nodes_per_fsdp_group=null",
        )


def sbatch_lines_are_options(config: RunConfig) -> Iterator[UserError]:
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
