"""Who sits on which node and device: inference first, the trainer next, in the order of the visible devices."""

from __future__ import annotations

from collections import Counter

from prl.config.engines import engine_groups, engine_shares
from prl.config.schema import RunConfig
from prl.config.world import has_engines, has_router, has_trainers, infer_devices, spans_nodes
from prl.planning.run_plan import EnginePlan, RoleName, RolePlan


def place(config: RunConfig, train_world: int) -> tuple[RolePlan, ...]:
    """All roles of a run: inference engines and their router, the orchestrator, trainer ranks, environment workers.

    Args:
        train_world: number of trainer ranks.
    """
    deployment = config.deployment
    if not has_engines(config):
        return _trainers(config, train_world, first_device=0, first_node=0)
    engines = _engines(config)
    router = (_host_role("router", "router", 0, 1),) if has_router(config) else ()
    if not has_trainers(config):
        return (*engines, *router)
    if spans_nodes(config):  # no node has both
        trainers = _trainers(config, train_world, first_device=0, first_node=1 + max(role.node for role in engines))
    else:
        first_device = deployment.num_infer_gpus if deployment.type == "disaggregated" else 0
        trainers = _trainers(config, train_world, first_device, first_node=0)
    return (*engines, *router, _host_role("orchestrator", "orchestrator", 0, 1), *trainers, *_envs(config))


def _engines(config: RunConfig) -> tuple[RolePlan, ...]:
    """Processes of all engines, prefill first. Each sits on neighbouring devices: one for the built-in engine."""
    slots = _slots(config, infer_devices(config), first_device=0, first_node=0)
    world = sum(group.num_engines * len(engine_shares(config, group)) for group in engine_groups(config))
    roles: list[RolePlan] = []
    index = used = 0
    for group in engine_groups(config):
        for _ in range(group.num_engines):
            head = f"inference/{len(roles)}"
            for share in engine_shares(config, group):
                width = group.tp * share.dp_local
                engine = EnginePlan(
                    index=index,
                    kind=group.kind,
                    tp=group.tp,
                    dp=group.dp,
                    start_rank=share.start_rank,
                    dp_local=share.dp_local,
                    serves=share.serves,
                    head=head,
                )
                roles.append(_device_role("inference", len(roles), world, *slots[used], width, engine))
                used += width
            index += 1
    return _number_on_nodes(roles)


def _number_on_nodes(roles: list[RolePlan]) -> tuple[RolePlan, ...]:
    """`local_rank` by position among those of the same node."""
    seen: Counter[int] = Counter()
    numbered = []
    for role in roles:
        numbered.append(role.model_copy(update={"local_rank": seen[role.node]}))
        seen[role.node] += 1
    return tuple(numbered)


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


def _device_role(
    role: RoleName, rank: int, world: int, node: int, device: int, width: int = 1, engine: EnginePlan | None = None
) -> RolePlan:
    """A process on `width` devices from `device` on."""
    return RolePlan(
        role=role,
        index=rank,
        name=f"{role}/{rank}",
        node=node,
        devices=tuple(range(device, device + width)),
        rank=rank,
        local_rank=device if node > 0 else rank,
        world_size=world,
        engine=engine,
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
