"""Who sits on which node and device: inference first, the trainer next, in the order of the visible devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from prl.config.engines import engine_groups, engine_shares
from prl.config.schema import RunConfig
from prl.config.world import World
from prl.planning.run_plan import EnginePlan, RoleName, RolePlan


def place(config: RunConfig, world: World) -> tuple[RolePlan, ...]:
    """All roles of a run: inference engines and their router, the orchestrator, trainer ranks, environment workers."""
    if not world.samples:
        return _trainers(config, world, first_node=0)
    engines = _engines(config, world) if world.has_engines else ()
    router = (_host_role("router", "router", 0, 1),) if world.has_router else ()
    if config.job == "eval":
        return (*engines, *router, _host_role("orchestrator", "orchestrator", 0, 1), *_envs(config))
    if not world.has_trainers:
        return (*engines, *router)
    # of several nodes, none has both
    first_node = 1 + max(role.node for role in engines) if engines and world.spans_nodes else 0
    trainers = _trainers(config, world, first_node)
    return (*engines, *router, _host_role("orchestrator", "orchestrator", 0, 1), *trainers, *_envs(config))


def _engines(config: RunConfig, world: World) -> tuple[RolePlan, ...]:
    """Processes of all engines, prefill first. Each sits on neighbouring devices: one for the built-in engine."""
    slots = _slots(config, world, world.infer_devices, world.infer_gpu_ids, first_node=0)
    groups = [(group, engine_shares(config, world, group)) for group in engine_groups(config, world)]
    processes = sum(group.num_engines * len(shares) for group, shares in groups)
    roles: list[RolePlan] = []
    index = used = 0
    for group, shares in groups:
        for _ in range(group.num_engines):
            head = f"inference/{len(roles)}"
            for share in shares:
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
                roles.append(_device_role("inference", len(roles), processes, slots[used : used + width], engine))
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


def _trainers(config: RunConfig, world: World, first_node: int) -> tuple[RolePlan, ...]:
    slots = _slots(config, world, world.ranks, world.train_gpu_ids, first_node)
    return tuple(_device_role("trainer", rank, world.ranks, [slot]) for rank, slot in enumerate(slots))


def _envs(config: RunConfig) -> tuple[RolePlan, ...]:
    """One worker process per environment of the mix."""
    names = list(config.env.mix)
    return tuple(_host_role("env", f"env/{name}", index, len(names)) for index, name in enumerate(names))


def _slots(config: RunConfig, world: World, count: int, ids: Sequence[int], first_node: int) -> list[tuple[int, int]]:
    """(node, device) of `count` processes with one device each; `ids` are their devices if all are on one node."""
    if not world.spans_nodes:
        return [(0, device) for device in ids]
    per_node = config.deployment.gpus_per_node
    return [(first_node + i // per_node, i % per_node) for i in range(count)]


def _device_role(
    role: RoleName, rank: int, world: int, slots: Sequence[tuple[int, int]], engine: EnginePlan | None = None
) -> RolePlan:
    """A process on the devices of these slots, which are all of one node."""
    node, device = slots[0]
    return RolePlan(
        role=role,
        index=rank,
        name=f"{role}/{rank}",
        node=node,
        devices=tuple(device for _, device in slots),
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
