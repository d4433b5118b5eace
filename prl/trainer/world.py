"""The trainer's processes as one world: process group, device, and the device mesh."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from prl.planning.run_plan import MeshPlan
from prl.runtime.child import ChildContext


@dataclass(frozen=True)
class World:
    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh  # dimensions dp_replicate, dp_shard (one of size 1 is kept, so that code needs no cases)
    data_rank: int
    data_ranks: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def pick_device(kind: str, local_device: int) -> torch.device:
    """deployment.device -> this process's device; "auto" takes a GPU if there is one."""
    if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()):
        return torch.device("cuda", local_device)
    return torch.device("cpu")


def join_world(ctx: ChildContext) -> World:
    """Rendezvous with the other trainer ranks (gloo on CPU, NCCL plus gloo on GPUs) and build the mesh."""
    role = ctx.role
    device = pick_device(ctx.plan.config.deployment.device, 0)
    if device.type == "cuda":
        torch.cuda.set_device(device)
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
    return build_world(ctx.plan.mesh, device)


def build_world(plan: MeshPlan, device: torch.device) -> World:
    """The mesh of an initialised process group."""
    assert plan.cp == plan.ep == 1, "refused at config time"
    mesh = init_device_mesh(
        device.type, (plan.dp_replicate, plan.dp_shard), mesh_dim_names=("dp_replicate", "dp_shard")
    )
    rank, size = dist.get_rank(), dist.get_world_size()
    return World(rank, size, device, mesh, data_rank=rank, data_ranks=size)


def sum_over_world(values: torch.Tensor) -> torch.Tensor:
    """All-reduce (sum) of a small float64 tensor of metrics."""
    if dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values


def largest_over_world(values: np.ndarray, tokens: int, share: float = 0.001) -> np.ndarray:
    """The largest `share` of all ranks' values (at least one), descending; the last is the (1 - share) quantile.

    values: this rank's; tokens: how many there are over all ranks. Only the candidates travel.
    """
    wanted = max(1, int(tokens * share))
    mine = np.sort(values)[::-1][:wanted]
    parts: list[np.ndarray | None] = [mine]
    if dist.get_world_size() > 1:
        parts = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
    return np.sort(np.concatenate([part for part in parts if part is not None]))[::-1][:wanted]


def leave_world() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
