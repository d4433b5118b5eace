"""FSDP2's collectives: a layer's weights gathered before it runs, its gradients reduced behind it.

A ring through all ranks of a group, over every NIC that the group has in a node: of what each rank sends, the part that
leaves the node is one over the group's ranks in it. NVLink and NICs work at once; the slower decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from prl.forecast.cost import NIC, NOTHING, NVLINK, Cost
from prl.forecast.layers import Layer
from prl.forecast.setting import BF16, FLOAT32, Setting

EXPERTS = "experts"


@dataclass(frozen=True)
class Group:
    """`ranks`, of which `near` lie in each node that has any."""

    ranks: int
    near: int


def dense_group(s: Setting) -> Group:
    ranks = s.mesh.fsdp_island
    return Group(ranks, min(ranks, s.node_ranks))


def expert_group(s: Setting) -> Group:
    """The ranks with the same place in their expert groups, which are every ep-th."""
    ranks = s.mesh.fsdp_island // s.mesh.ep
    return Group(ranks, min(ranks, max(1, s.node_ranks // s.mesh.ep)))


def replica_group(s: Setting) -> Group:
    """Those that hold the same shard of different replicas."""
    island = s.mesh.fsdp_island
    return Group(s.mesh.dp_replicate, min(s.mesh.dp_replicate, max(1, s.node_ranks // island)))


def ring(s: Setting, what: str, nbytes: float, group: Group) -> Cost:
    """Gather or reduce-scatter so many bytes."""
    if group.ranks == 1 or not nbytes:
        return NOTHING
    sent = nbytes * (group.ranks - 1) / group.ranks
    outside = sent / group.near if group.ranks > group.near else 0.0
    inside = sent - outside
    seconds = {"nvlink_ring": s.hardware.seconds("nvlink_ring", inside), "nic": s.hardware.seconds("nic", outside)}
    slower = max(seconds, key=seconds.__getitem__)
    traffic = {(what, link): size for link, size in ((NVLINK, inside), (NIC, outside)) if size}
    return Cost({slower: seconds[slower]}, traffic)


def gathered(s: Setting, what: str, weights: float, group: Group) -> Cost:
    """Cast, gathered in bfloat16, copied into place."""
    if s.alone or (what == EXPERTS and s.experts_alone):
        return s.memory(weights * (FLOAT32 + BF16)) if s.wide else NOTHING
    local = s.memory(weights * ((FLOAT32 + BF16) / group.ranks + 3 * BF16))
    return ring(s, f"FSDP gathers, {what}", weights * BF16, group) + local


def reduced(s: Setting, what: str, weights: float, group: Group) -> Cost:
    """Gradients copied together in `reduce_dtype`, reduced, and over replicas added up; a rank's share is float32."""
    if s.alone or (what == EXPERTS and s.experts_alone):
        return s.memory(weights * (BF16 + FLOAT32))
    number = reduced_bytes(s, group)
    local = s.memory(weights * (BF16 + 2 * number + FLOAT32 / group.ranks))
    cost = ring(s, f"FSDP reductions, {what}", weights * number, group) + local
    replicas = replica_group(s)
    if replicas.ranks > 1:
        share = weights * number / group.ranks
        cost += ring(s, f"HSDP reductions, {what}", share, replicas) * 2
    return cost


def reduced_bytes(s: Setting, group: Group) -> int:
    """Of one number of a gradient on its way; what goes nowhere is not rounded (prl/trainer/parallelize.py)."""
    travels = group.ranks * s.mesh.dp_replicate > 1
    return BF16 if travels and s.config.parallelism.reduce_dtype == "bfloat16" else FLOAT32


def layer_units(s: Setting, layer: Layer) -> list[tuple[str, float, Group]]:
    """(what, weights whole on a rank, group): the layer, and its experts under expert parallelism."""
    if s.mesh.ep == 1 or not layer.experts:
        return [("layers", layer.dense + layer.experts, dense_group(s))]
    return [("layers", layer.dense, dense_group(s)), (EXPERTS, layer.experts / s.mesh.ep, expert_group(s))]


def gather_layer(s: Setting, layer: Layer) -> Cost:
    cost = NOTHING
    for what, weights, group in layer_units(s, layer):
        cost += gathered(s, what, weights, group)
    return cost


def reduce_layer(s: Setting, layer: Layer) -> Cost:
    cost = NOTHING
    if s.frozen:
        return cost
    for what, weights, group in layer_units(s, layer):
        cost += reduced(s, what, weights, group)
    return cost
