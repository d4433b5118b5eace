"""What follows from a configuration by arithmetic alone: who takes part, how many devices, in meshes of what size.

`world_of` works it out; rules and plans are handed the result. The rules say whether the sizes fit.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from prl.config.schema import RunConfig
from prl.config.schema_model import CpStyle

MAX_AUTO_EP = 8  # wider groups leave the NVLink domain of a usual node
UNIT_PARAMETERS = 1 << 26  # of an FSDP unit, where its layers are smaller than that


@dataclass(frozen=True)
class Mesh:
    """Sizes of the trainer's device mesh. `ep` spans `cp` and a part of `dp_shard`, so it adds no ranks of its own."""

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


@dataclass(frozen=True)
class World:
    """What a job consists of, with every `auto` resolved. Devices are GPUs, or CPU slots where there are none."""

    samples: bool  # it needs inference engines, its own or those of inference.urls
    has_engines: bool  # it has inference engines of its own
    has_router: bool  # and a router of its own before them
    has_trainers: bool
    mesh: Mesh  # of the trainer; without one, of what the configuration says of it
    cp_style: CpStyle  # how its context groups attend
    train_devices: int | None  # that the deployment gives the trainer; None: as many as the mesh needs
    infer_devices: int  # of all engines together, were there any
    spans_nodes: bool  # roles sit on more than one node
    node_ranks: int  # trainer ranks that fill a node, neighbours; were there fewer, all of them
    takes_turns: bool  # engines sleep while the trainer works, on the devices of both
    # the engine's share of each GPU where it goes on beside a trainer; None: it is alone or takes turns
    overlapping_part: float | None
    # on the only node, in the order of its processes; () where there are several
    infer_gpu_ids: tuple[int, ...]
    train_gpu_ids: tuple[int, ...]

    @property
    def ranks(self) -> int:
        """Trainer ranks of the job."""
        return self.mesh.size if self.has_trainers else 0

    @property
    def ep_nodes(self) -> int:
        """Nodes over which an expert group is spread."""
        return -(-self.mesh.ep // self.node_ranks)

    @property
    def engine_devices(self) -> int:
        """Devices of the job's own engines."""
        return self.infer_devices if self.has_engines else 0


def world_of(config: RunConfig) -> World:
    """Of any configuration, whether its sizes fit each other or not."""
    deployment, bench = config.deployment, config.bench
    target = None if bench is None else bench.target
    samples = config.job in ("rl", "inference", "eval") or target in ("inference", "stack")
    has_engines = samples and not config.inference.urls
    has_trainers = config.job in ("rl", "sft") or target not in (None, "inference")
    if deployment.type == "multi_node":
        infer_devices = deployment.num_infer_nodes * deployment.gpus_per_node
    else:
        infer_devices = deployment.num_infer_gpus
    train_devices = _train_devices(config)
    mesh = _mesh(config, train_devices)
    engine_devices, ranks = infer_devices if has_engines else 0, mesh.size if has_trainers else 0
    spans_nodes = _spans_nodes(config, engine_devices + ranks)
    on_the_same = has_engines and has_trainers and deployment.type == "colocated"
    infer, train = ((), ()) if spans_nodes else _gpu_ids(config, engine_devices, ranks)
    return World(
        samples=samples,
        has_engines=has_engines,
        has_router=has_engines and config.inference.router.type in ("auto", "builtin", "vllm_router"),
        has_trainers=has_trainers,
        mesh=mesh,
        cp_style=context_style(config),
        train_devices=train_devices,
        infer_devices=infer_devices,
        spans_nodes=spans_nodes,
        node_ranks=deployment.gpus_per_node if spans_nodes else mesh.size,
        takes_turns=takes_turns(config),
        overlapping_part=deployment.infer_memory_fraction if on_the_same else None,
        infer_gpu_ids=infer,
        train_gpu_ids=train,
    )


def takes_turns(config: RunConfig) -> bool:
    """Whether engines sleep while the trainer works, on the devices of both."""
    return config.deployment.type == "colocated" and config.deployment.infer_memory_fraction is None


def shares_prefixes(config: RunConfig) -> bool:
    """Whether the trainer runs once what documents have in common at their beginning: asked for, and known to the
    attention of the model and of its context parallelism. States of layers belong to one document.
    """
    model, card = config.model, config.model.card
    known = model.impl != "hf" and card.is_native and not card.state_layers
    whole_row = config.parallelism.cp == 1 or context_style(config) == "ulysses"
    rl = config.job == "rl" or (config.bench is not None and config.bench.target == "trainer_rl")
    return config.memory_recipe.share_prefixes and rl and known and whole_row


def goes_without_fsdp(config: RunConfig, replicas: int, island: int) -> bool:
    """Whether each rank holds the model, and FSDP has nothing to do: neither to shard, nor to move weights to the host
    and back. Activation offloading knows the weights that FSDP gathers, and would take casts for activations. An
    optimizer on the host has gradients that are reduced already, micro-batch by micro-batch.
    """
    recipe = config.memory_recipe
    if replicas > 1 and recipe.optim_cpu_offload == "full":
        return False
    return island == 1 and not recipe.fsdp_cpu_offload and not recipe.ac_offloading.enabled


def experts_go_without_fsdp(config: RunConfig, ranks: int, ep: int) -> bool:
    """Whether expert parallelism leaves each rank experts that no other has, and FSDP nothing to do with them. Where
    tokens go in pieces it has: it casts once for all of them.
    """
    recipe, parallelism = config.memory_recipe, config.parallelism
    if parallelism.ep_pieces > 1 or parallelism.deepep_token_chunk_size:
        return False
    return ep > 1 and ranks == ep and not recipe.fsdp_cpu_offload and not recipe.ac_offloading.enabled


def fsdp_units(sizes: Sequence[float], experts_apart: bool) -> list[range]:
    """Layers of so many parameters each, in the units that FSDP gathers and reduces at once: neighbours, until they
    have `UNIT_PARAMETERS`. Each unit costs the host milliseconds, whatever is in it. Where experts are units of their
    own (experts_apart) each layer is one, for both are gathered ahead of it.
    """
    units: list[range] = []
    held = 0.0
    for index, size in enumerate(sizes):
        if not units or experts_apart or held >= UNIT_PARAMETERS:
            units.append(range(index, index))
            held = 0.0
        units[-1] = range(units[-1].start, index + 1)
        held += size
    return units


def context_style(config: RunConfig) -> CpStyle:
    """As asked for; `auto` is the first that the model knows, and a ring where Ulysses cannot share out the heads."""
    card, style = config.model.card, config.parallelism.cp_style
    if style != "auto":
        return style
    uneven = card.num_attention_heads % config.parallelism.cp > 0
    fits = [known for known in card.cp_styles if known != "ulysses" or not uneven]
    return (*fits, *card.cp_styles, "ulysses")[0]


def _train_devices(config: RunConfig) -> int | None:
    deployment = config.deployment
    if deployment.type == "multi_node":
        return deployment.num_train_nodes * deployment.gpus_per_node
    return None if deployment.num_train_gpus == "auto" else deployment.num_train_gpus


def _spans_nodes(config: RunConfig, devices: int) -> bool:
    """As asked for, or because the GPUs of one node do not suffice for so many devices.

    CPU slots are as many as one likes, so `device=cpu` stays on one node unless told otherwise.
    """
    deployment = config.deployment
    if deployment.type == "disaggregated" and deployment.device != "cpu":
        return devices > deployment.gpus_per_node
    return deployment.type == "multi_node"


def _gpu_ids(config: RunConfig, engines: int, ranks: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Devices of engines and of trainer ranks on a run's only node. What is not named takes the lowest devices: of
    those that are left, or the trainer's own where engines share them.
    """
    deployment = config.deployment
    infer, train = deployment.infer_gpu_ids, deployment.train_gpu_ids
    if deployment.type == "colocated":
        train = train if train is not None else tuple(range(ranks))
        infer = infer if infer is not None else train
    infer = infer if infer is not None else _lowest(engines, train or ())
    train = train if train is not None else _lowest(ranks, infer[:engines])
    return infer[:engines], train[:ranks]


def _lowest(count: int, taken: Collection[int]) -> tuple[int, ...]:
    others = set(taken)
    return tuple([device for device in range(count + len(others)) if device not in others][:count])


def _mesh(config: RunConfig, devices: int | None) -> Mesh:
    """The mesh as asked for; `auto` is what fills the devices or, without a number of them, the smallest that fits.
    Only one of dp_shard and dp_replicate can be (a rule says so).

    nodes_per_fsdp_group sets dp_replicate: each group of so many nodes holds one replica of the weights.
    """
    parallelism, deployment = config.parallelism, config.deployment
    dp_replicate = _replicas(config, devices)
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
    return Mesh(dp_replicate=dp_replicate, dp_shard=dp_shard, cp=parallelism.cp, ep=ep)


def _replicas(config: RunConfig, devices: int | None) -> int:
    parallelism = config.parallelism
    if parallelism.dp_replicate != "auto":
        return parallelism.dp_replicate
    island = parallelism.cp if parallelism.dp_shard == "auto" else parallelism.dp_shard * parallelism.cp
    return max(1, (devices or 1) // island)


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
