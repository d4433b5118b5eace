"""Where a trainer rank sends new weights: the publisher of the run's transport, made for this rank."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist

from prl.config.block_fp8 import sends_blocks
from prl.config.loopback import LOOPBACK_HOSTS
from prl.models.adapters.peft import peft_config, peft_tensors
from prl.models.checkpoints.writing import hf_tensors
from prl.models.layers.decoder import Decoder
from prl.planning.run_plan import RunPlan
from prl.runtime.process.child import ChildContext
from prl.trainer.owned import Owned, owned_by
from prl.trainer.world import World, gather_bytes, meet
from prl.transport.addresses import address_towards
from prl.transport.buckets import Announce
from prl.transport.nccl_group import connect
from prl.transport.shelves import alone
from prl.transport.stores import serve_store
from prl.transport.weights import Publisher, make_publisher
from prl.transport.weights_files import FilesystemPublisher
from prl.transport.weights_ipc import IpcPublisher
from prl.transport.weights_lora import AdapterPublisher
from prl.transport.weights_nccl import NcclPublisher
from prl.transport.weights_shared import SharedMemoryPublisher
from prl.transport.weights_tcp import TcpPublisher

PartsPublisher = NcclPublisher | FilesystemPublisher | TcpPublisher | SharedMemoryPublisher
AnyPublisher = Publisher | PartsPublisher | None  # None: of ranks that only take part in gathers


def publisher_of(ctx: ChildContext, world: World, model: Decoder) -> AnyPublisher:
    """This rank's publisher; None for ranks that only take part in the gathers. A collective."""
    transport = ctx.plan.config.weight_transport
    address = ctx.endpoints["rendezvous"].rsplit(":", 1)[0]
    if ctx.plan.config.inference.urls:
        address = address_towards(ctx.plan.config.inference.urls, address)
    if transport.type == "ipc":
        return _ipc_publisher(ctx, world, address)
    if transport.type == "nccl":
        return _nccl_publisher(ctx, world, address)
    if transport.type == "lora":
        if not world.is_main:
            return None
        config = peft_config(model, ctx.plan.config.memory_recipe.lora, ctx.plan.config.model.name)
        return AdapterPublisher(ctx.run_dir / "weights", transport.keep, config)
    if not world.is_main:
        address = own_address(ctx.endpoints["rendezvous"], address)
    gather = gather_bytes if world.size > 1 else alone
    directory, segments = ctx.run_dir / "weights", Path(ctx.shared_memory)
    publisher = make_publisher(transport, directory, segments, address, world.rank, gather)
    meet()  # the directory is there
    return publisher


def own_address(rendezvous: str, first: str) -> str:
    """Of a rank that is not the first: of the interface by which it reaches the rendezvous, where that is on the
    network and so perhaps on another host; on one host the `first` rank's.
    """
    url = f"http://{rendezvous}"
    return first if urlsplit(url).hostname in LOOPBACK_HOSTS else address_towards([url], LOOPBACK_HOSTS[0])


def _store_of_all(ctx: ChildContext, world: World, address: str) -> dist.TCPStore:
    """The first rank's, which all others use. A collective."""
    timeout_s = ctx.plan.config.weight_transport.timeout_s
    store = serve_store(address, timedelta(seconds=timeout_s)) if world.is_main else None
    port = torch.tensor(0 if store is None else store.port)
    if world.size > 1:
        dist.broadcast(port, src=0)
    return connect(address, int(port), timeout_s) if store is None else store


def _nccl_publisher(ctx: ChildContext, world: World, address: str) -> NcclPublisher:
    """Every rank's: each sends what it holds."""
    transport = ctx.plan.config.weight_transport
    return NcclPublisher(
        _store_of_all(ctx, world, address),
        world.rank,
        world.size,
        count_receivers(ctx.plan),
        world.device,
        num_buckets=transport.stage_mib // transport.bucket_mib,
        beat=ctx.beat,
        **device_options(ctx.plan),
    )


def _ipc_publisher(ctx: ChildContext, world: World, address: str) -> IpcPublisher:
    """Every rank's: it serves the engine on its own GPU, if there is one."""
    store = _store_of_all(ctx, world, address)
    role = ctx.role
    serves = any(
        engine.node == role.node and role.devices[0] in engine.devices for engine in ctx.plan.roles_of("inference")
    )
    announcing = {"host": address, "port": store.port} if world.is_main else None
    return IpcPublisher(store, announcing, world.device, serves=serves, **device_options(ctx.plan))


class RankWeights:
    """This rank's, as its publisher takes them."""

    def __init__(self, plan: RunPlan, world: World, model: Decoder, publisher: AnyPublisher) -> None:
        """A collective."""
        self.model, self.publisher, self.dtype = model, publisher, wire_dtype(plan)
        self.only_adapters = plan.config.weight_transport.type == "lora"
        self.in_blocks = sends_blocks(plan.config)
        self.owned: Owned | None = None  # of those that send what they hold
        whole = isinstance(publisher, FilesystemPublisher) and publisher.gather is None  # of an only rank
        if isinstance(publisher, PartsPublisher) and not whole:
            self.owned = owned_by(model, self.dtype, world, self.in_blocks)
            publisher.hold(self.owned.table, self.owned.boxes)

    def publish(self, version: int, announce: Announce) -> None:
        """A collective where weights are gathered for it."""
        if self.owned is not None:
            assert isinstance(self.publisher, PartsPublisher)
            self.publisher.publish(version, self.owned.parts(), announce)
            return
        model = self.model
        if self.only_adapters:
            tensors = peft_tensors(model, model.card)
        else:
            tensors = hf_tensors(model, self.dtype, self.in_blocks)
        assert not isinstance(self.publisher, NcclPublisher | TcpPublisher | SharedMemoryPublisher)
        if self.publisher is not None:
            self.publisher.publish(version, tensors, announce)
            return
        for _ in tensors:  # take part in the gathers
            pass


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
    """In which matrices travel: the one in which engines compute. Adapters (None) keep the trainer's own."""
    inference, model = plan.config.inference, plan.config.model
    if plan.config.weight_transport.type == "lora":
        return None
    return getattr(torch, model.dtype if inference.dtype == "auto" else inference.dtype)
