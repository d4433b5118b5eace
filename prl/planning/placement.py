"""Who sits on which node and device: inference first, the trainer next, in the order of the visible devices."""

from __future__ import annotations

from prl.config.schema import RunConfig
from prl.config.world import has_engines, has_trainers, spans_nodes
from prl.planning.run_plan import RoleName, RolePlan


def place(config: RunConfig, train_world: int) -> tuple[RolePlan, ...]:
    """All roles of a run: inference engines, the orchestrator, trainer ranks, environment workers.

    Args:
        train_world: number of trainer ranks.
    """
    deployment = config.deployment
    if not has_engines(config):
        return _trainers(config, train_world, first_device=0, first_node=0)
    multi_node = deployment.type == "multi_node"
    num_engines = deployment.num_infer_nodes * deployment.gpus_per_node if multi_node else deployment.num_infer_gpus
    engines = _engines(config, num_engines)
    if not has_trainers(config):
        return engines
    if spans_nodes(config):  # no node has both
        trainers = _trainers(config, train_world, first_device=0, first_node=1 + max(role.node for role in engines))
    else:
        first_device = deployment.num_infer_gpus if deployment.type == "disaggregated" else 0
        trainers = _trainers(config, train_world, first_device, first_node=0)
    return (*engines, _host_role("orchestrator", "orchestrator", 0, 1), *trainers, *_envs(config))


def _engines(config: RunConfig, count: int) -> tuple[RolePlan, ...]:
    """Engines over `count` devices: tp * dp neighbours each, which is one for the built-in engine."""
    slots = _slots(config, count, first_device=0, first_node=0)
    width = config.inference.tp * config.inference.dp
    return tuple(
        _device_role("inference", rank, count // width, *slots[rank * width], width) for rank in range(count // width)
    )


def _trainers(config: RunConfig, world: int, first_device: int, first_node: int) -> tuple[RolePlan, ...]:
    slots = _slots(config, world, first_device, first_node)
    return tuple(_device_role("trainer", rank, world, node, device) for rank, (node, device) in enumerate(slots))


def _envs(config: RunConfig) -> tuple[RolePlan, ...]:
    """One worker process per environment of the mix."""
    names = list(config.env.mix)
    return tuple(_host_role("env", f"env/{name}", index, len(names)) for index, name in enumerate(names))


def _slots(config: RunConfig, count: int, first_device: int, first_node: int) -> list[tuple[int, int]]:
    """(node, device) of `count` processes with one device each."""
    if not spans_nodes(config):
        return [(0, first_device + i) for i in range(count)]
    per_node = config.deployment.gpus_per_node
    return [(first_node + i // per_node, i % per_node) for i in range(count)]


def _device_role(role: RoleName, rank: int, world: int, node: int, device: int, width: int = 1) -> RolePlan:
    """A process on `width` devices from `device` on; `local_rank` is its position among those of its role and node."""
    local_rank = device // width if role == "inference" or node > 0 else rank
    return RolePlan(
        role=role,
        index=rank,
        name=f"{role}/{rank}",
        node=node,
        devices=tuple(range(device, device + width)),
        rank=rank,
        local_rank=local_rank,
        world_size=world,
    )


def _host_role(role: RoleName, name: str, index: int, world: int) -> RolePlan:
    """A process without devices, on the first node."""
    return RolePlan(
        role=role,
        index=index,
        name=name,
        node=0,
        devices=(),
        rank=index,
        local_rank=index,
        world_size=world,
    )
