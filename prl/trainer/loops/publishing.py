"""Where a trainer rank sends new weights: the publisher of the run's transport, made for this rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from prl.models.adapters.peft import peft_config
from prl.planning.run_plan import RunPlan
from prl.runtime.process.child import ChildContext
from prl.trainer.world import World
from prl.transport.kinds import DEVICE_TRANSPORTS
from prl.transport.serving import address_towards
from prl.transport.stores import serve_store
from prl.transport.weights import Publisher, make_publisher
from prl.transport.weights_ipc import IpcPublisher
from prl.transport.weights_lora import AdapterPublisher
from prl.transport.weights_nccl import NcclPublisher


def publisher_of(ctx: ChildContext, world: World) -> Publisher | None:
    """This rank's publisher; None for ranks that only take part in the gathers. A collective."""
    transport = ctx.plan.config.weight_transport
    address = ctx.endpoints["rendezvous"].rsplit(":", 1)[0]
    if ctx.plan.config.inference.urls:
        address = address_towards(ctx.plan.config.inference.urls, address)
    if transport.type == "ipc":
        return _ipc_publisher(ctx, world, address)
    if not world.is_main:
        return None
    if transport.type == "nccl":
        receivers = count_receivers(ctx.plan)
        buckets = transport.stage_mib // transport.bucket_mib
        options = device_options(ctx.plan)
        return NcclPublisher(address, receivers, world.device, num_buckets=buckets, beat=ctx.beat, **options)
    if transport.type == "lora":
        config = peft_config(ctx.plan.config.memory_recipe.lora, ctx.plan.config.model.name)
        return AdapterPublisher(ctx.run_dir / "weights", transport.keep, config)
    return make_publisher(transport, ctx.run_dir / "weights", Path(ctx.shared_memory), address)


def _ipc_publisher(ctx: ChildContext, world: World, address: str) -> IpcPublisher:
    """Every rank's: it serves the engine on its own GPU, if there is one. The first rank holds the store for all."""
    timeout = timedelta(seconds=ctx.plan.config.weight_transport.timeout_s)
    store = serve_store(address, timeout) if world.is_main else None
    port = torch.tensor(0 if store is None else store.port)
    if world.size > 1:
        dist.broadcast(port, src=0)
    if store is None:
        store = dist.TCPStore(address, int(port), is_master=False, timeout=timeout)
    role = ctx.role
    serves = any(
        engine.node == role.node and role.devices[0] in engine.devices for engine in ctx.plan.roles_of("inference")
    )
    announcing = {"host": address, "port": store.port} if world.is_main else None
    return IpcPublisher(store, announcing, world.device, serves=serves, **device_options(ctx.plan))


def device_options(plan: RunPlan) -> dict[str, Any]:
    transport = plan.config.weight_transport
    return {
        "timeout_s": transport.timeout_s,
        "bucket_bytes": transport.bucket_mib << 20,
        "verify": transport.verify_checksum,
    }


def count_receivers(plan: RunPlan) -> int:
    """Processes of all engines that hold weights: one on each of their devices."""
    return sum(len(engine.devices) for engine in plan.roles_of("inference"))


def wire_dtype(plan: RunPlan) -> torch.dtype | None:
    """In which matrices travel: from GPU to GPU the one in which engines compute, else (None) the trainer's own."""
    inference, model = plan.config.inference, plan.config.model
    if plan.config.weight_transport.type not in DEVICE_TRANSPORTS:
        return None
    return getattr(torch, model.dtype if inference.dtype == "auto" else inference.dtype)
