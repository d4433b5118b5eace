"""Rules about devices and nodes."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.rules.rule import next_divisor
from prl.config.schema import RunConfig
from prl.config.world import has_engines, has_trainers, resolve_world


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
