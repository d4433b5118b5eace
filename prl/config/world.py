"""Sizes of the trainer's world, with every `auto` resolved. Arithmetic only; the rules say whether the sizes fit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from prl.config.schema import RunConfig


@dataclass(frozen=True)
class World:
    """Sizes of the device mesh. `ep` spans `cp` and a part of `dp_shard`, so it adds no ranks of its own."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ep: int

    @property
    def size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Ranks that see different data; the ranks of one CP group share theirs."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp_island(self) -> int:
        """Ranks over which one replica of the weights is sharded, and within which experts may be spread."""
        return self.dp_shard * self.cp


def has_trainers(config: RunConfig) -> bool:
    """Whether trainer ranks are part of the job."""
    return config.job in ("rl", "sft") or (config.bench is not None and config.bench.target != "inference")


def samples(config: RunConfig) -> bool:
    """Whether the job needs inference engines, its own or others."""
    return config.job in ("rl", "inference", "eval") or (
        config.bench is not None and config.bench.target in ("inference", "stack")
    )


def has_engines(config: RunConfig) -> bool:
    """Whether inference engines are part of the job; those of inference.urls are not."""
    return samples(config) and not config.inference.urls


def has_router(config: RunConfig) -> bool:
    """Whether a router of our own is part of the job."""
    return has_engines(config) and config.inference.router.type in ("auto", "builtin", "vllm_router")


def takes_turns(config: RunConfig) -> bool:
    """Whether engines sleep while the trainer works, on the devices of both."""
    return config.deployment.type == "colocated" and config.deployment.infer_memory_fraction is None


def overlapping_part(config: RunConfig) -> float | None:
    """The engine's part of each GPU where it goes on beside a trainer; None where it is alone or takes turns."""
    both = has_engines(config) and has_trainers(config) and config.deployment.type == "colocated"
    return config.deployment.infer_memory_fraction if both else None


def requested_devices(config: RunConfig) -> int | None:
    """Training devices that the deployment asks for, or None for `auto`."""
    deployment = config.deployment
    if deployment.type == "multi_node":
        return deployment.num_train_nodes * deployment.gpus_per_node
    return None if deployment.num_train_gpus == "auto" else deployment.num_train_gpus


def infer_devices(config: RunConfig) -> int:
    """Devices of all engines together."""
    deployment = config.deployment
    if deployment.type == "multi_node":
        return deployment.num_infer_nodes * deployment.gpus_per_node
    return deployment.num_infer_gpus


def devices_needed(config: RunConfig) -> int:
    """Devices of all engines and trainer ranks together, on a deployment where each has its own."""
    train = resolve_world(config).size if has_trainers(config) else 0
    return train + (config.deployment.num_infer_gpus if has_engines(config) else 0)


def spans_nodes(config: RunConfig) -> bool:
    """Whether roles sit on more than one node: as asked for, or because the GPUs of one do not suffice.

    CPU slots are as many as one likes, so `device=cpu` stays on one node unless told otherwise.
    """
    deployment = config.deployment
    if deployment.type == "disaggregated" and deployment.device != "cpu":
        return devices_needed(config) > deployment.gpus_per_node
    return deployment.type == "multi_node"


def gpu_ids(config: RunConfig) -> tuple[list[int], list[int]]:
    """Devices of engines and of trainer ranks on a run's only node, in their order. What is not named takes the lowest
    devices: of those that are left, or the trainer's own where engines share them.
    """
    deployment = config.deployment
    engines = infer_devices(config) if has_engines(config) else 0
    ranks = resolve_world(config).size if has_trainers(config) else 0
    infer, train = deployment.infer_gpu_ids, deployment.train_gpu_ids
    if deployment.type == "colocated":
        train = train if train is not None else tuple(range(ranks))
        infer = infer if infer is not None else train
    infer = infer if infer is not None else _lowest(engines, train or ())
    train = train if train is not None else _lowest(ranks, infer[:engines])
    return list(infer[:engines]), list(train[:ranks])


def _lowest(count: int, taken: Sequence[int]) -> tuple[int, ...]:
    return tuple([device for device in range(count + len(taken)) if device not in taken][:count])


MAX_AUTO_EP = 8  # wider groups leave the NVLink domain of a usual node


def resolve_world(config: RunConfig) -> World:
    """The mesh as asked for; `auto` is what fills the devices or, without a number of them, the smallest that fits.

    nodes_per_fsdp_group sets dp_replicate: each group of so many nodes holds one replica of the weights.
    """
    parallelism, devices, deployment = config.parallelism, requested_devices(config), config.deployment
    dp_replicate = parallelism.dp_replicate
    if deployment.type == "multi_node" and deployment.nodes_per_fsdp_group is not None:
        dp_replicate = max(1, deployment.num_train_nodes // deployment.nodes_per_fsdp_group)
    ep = 1 if parallelism.ep == "auto" else parallelism.ep
    if parallelism.dp_shard != "auto":
        dp_shard = parallelism.dp_shard
    elif devices is None:
        dp_shard = ep // math.gcd(ep, parallelism.cp)
    else:
        dp_shard = max(1, devices // (dp_replicate * parallelism.cp))
    if parallelism.ep == "auto":
        ep = largest_ep(config.model.card.num_experts, dp_shard * parallelism.cp, parallelism.cp)
    return World(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=parallelism.cp, ep=ep)


def largest_ep(num_experts: int, island: int, cp: int) -> int:
    """The widest expert parallelism within an island, at most 8 (or cp, if wider); 1 for dense models."""
    limit = max(MAX_AUTO_EP, cp)
    fits = [ep for ep in divisors(num_experts) if island % ep == 0 and ep % cp == 0 and ep <= limit]
    return max(fits, default=1)


def expert_dimension(shape: Sequence[int], ranks: int) -> int:
    """Along which dimension stacked expert matrices [E, rows, columns] are sharded within an expert group's share.

    FSDP2 shards unevenly along dimension 0 alone, where it pads. That is the experts themselves, often fewer than the
    ranks, which then hold nothing; so rows or columns come first, wherever the ranks divide one of them.
    """
    return next((dim for dim in range(1, len(shape)) if shape[dim] % ranks == 0), 0)


def divisors(number: int) -> list[int]:
    """Ascending; empty for 0."""
    return [d for d in range(1, number + 1) if number % d == 0]


def closest(number: int, options: list[int]) -> int:
    """The option next to `number`, the smaller one on a tie."""
    return min(options, key=lambda option: (abs(option - number), option))
