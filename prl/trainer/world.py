"""The trainer's processes as one world: process group, device, and the device meshes.

Ranks are counted with dp_replicate outermost, then dp_shard, then cp; expert parallelism takes `ep` neighbouring ranks
of an FSDP island (dp_shard x cp), so an expert group holds whole context groups and, up to 8 ranks, lies in one node.
The same ranks are seen as three meshes:

    dense    dp_replicate x fsdp          fsdp = dp_shard * cp: what everything but experts is sharded over
    experts  dp_replicate x efsdp x ep    efsdp = fsdp / ep: each expert group's experts are sharded over the others
    data     data x cp                    who sees which batch, and who shares a sequence

Where tokens go to their experts by way of nodes, ep is cut into nodes x ranks of each (`cut_at_nodes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prl.config.world import world_of
from prl.models.device import limit_memory_beside_engine, pick_device
from prl.planning.run_plan import MeshPlan
from prl.runtime.process.child import ChildContext


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    dense: DeviceMesh
    experts: DeviceMesh | None  # None without expert parallelism
    data: DeviceMesh
    node_ranks: int  # ranks of this world that fill a node, neighbours

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        return self.data.get_local_rank("data")

    @property
    def data_ranks(self) -> int:
        return self.data["data"].size()

    @property
    def is_first_of_context(self) -> bool:
        """Whether this rank speaks for its context group, whose ranks all hold the same results."""
        return self.data.get_local_rank("cp") == 0

    @property
    def cp(self) -> int:
        return self.data["cp"].size()


def join_world(ctx: ChildContext) -> World:
    """Rendezvous with the other trainer ranks (gloo on CPU, NCCL plus gloo on GPUs) and build the mesh."""
    role = ctx.role
    device = pick_device(ctx.plan.config.deployment.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if (part := world_of(ctx.plan.config).overlapping_part) is not None:
        limit_memory_beside_engine(device, part)
    host, port = ctx.endpoints["rendezvous"].rsplit(":", 1)
    fd = ctx.listen_socket.detach() if role.rank == 0 and ctx.listen_socket is not None else None
    store = dist.TCPStore(
        host,
        int(port),
        world_size=role.world_size,
        is_master=role.rank == 0,
        timeout=timedelta(seconds=ctx.plan.config.deployment.start_timeout_s),
        wait_for_workers=False,
        master_listen_fd=fd,
        use_libuv=True,
    )
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=role.rank,
        world_size=role.world_size,
        timeout=timedelta(seconds=ctx.plan.config.deployment.hang_timeout_s),
    )
    return build_world(ctx.plan.mesh, device, world_of(ctx.plan.config).node_ranks)


def build_world(plan: MeshPlan, device: torch.device, node_ranks: int | None = None) -> World:
    """The meshes of an initialised process group; node_ranks: as of `World`, None: all are on one node."""
    island = plan.dp_shard * plan.cp

    def mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return init_device_mesh(device.type, sizes, mesh_dim_names=names)

    return World(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        device=device,
        dense=mesh((plan.dp_replicate, island), ("dp_replicate", "fsdp")),
        experts=mesh((plan.dp_replicate, island // plan.ep, plan.ep), ("dp_replicate", "efsdp", "ep"))
        if plan.ep > 1
        else None,
        data=mesh((plan.data_ranks, plan.cp), ("data", "cp")),
        node_ranks=node_ranks or dist.get_world_size(),
    )


def cut_at_nodes(world: World) -> DeviceMesh:
    """The expert groups, each of whole nodes: groups x nodes x ranks of a node. A collective of the world."""
    assert world.experts is not None
    nodes = world.experts["ep"].size() // world.node_ranks
    sizes = (world.size // (nodes * world.node_ranks), nodes, world.node_ranks)
    return init_device_mesh(world.device.type, sizes, mesh_dim_names=("groups", "nodes", "ranks"))


def shard_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """What `fully_shard` wants: the sharding dimension alone, or with dp_replicate before it (HSDP)."""
    return mesh["dp_replicate", name] if mesh["dp_replicate"].size() > 1 else mesh[name]


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """All-reduce (sum) of a small float64 tensor of metrics."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def meet() -> None:
    """Return once all ranks are here."""
    sum_over_world(torch.zeros(1, dtype=torch.float64))


def gather_bytes(data: bytes) -> list[bytes]:
    """What each rank has called it with, on all of them."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [data]
    size = torch.tensor([len(data)])
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = torch.zeros(max(1, *(int(n) for n in sizes)), dtype=torch.uint8)
    padded.numpy()[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded)
    return [given[: int(n)].numpy().tobytes() for given, n in zip(everyones, sizes, strict=True)]


def sum_over_data(values: torch.Tensor, world: World) -> torch.Tensor:
    """`sum_over_world` of what all ranks of a context group hold alike: each data rank counts once."""
    return sum_over_world(values) / world.cp


def largest_over_world(values: np.ndarray, tokens: int, share: float = 0.001) -> np.ndarray:
    """The largest `share` of all ranks' values (at least one), descending; the last is the (1 - share) quantile.

    values: this rank's; tokens: how many there are over all ranks. Only the candidates travel.
    """
    wanted = max(1, int(tokens * share))
    mine = np.full(wanted, -np.inf)
    best = np.sort(values)[::-1][:wanted]
    mine[: len(best)] = best
    if dist.get_world_size() > 1:
        parts = [torch.empty(wanted, dtype=torch.float64) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, torch.from_numpy(mine))
        mine = np.concatenate([part.numpy() for part in parts])
    everywhere = np.sort(mine[~np.isneginf(mine)])[::-1]
    return everywhere[:wanted].astype(values.dtype)


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
