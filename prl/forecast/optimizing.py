"""Clipping and the optimizer's step on a rank's shards."""

from __future__ import annotations

from collections import Counter

from prl.forecast.cost import HOST, NIC, NVLINK, Cost
from prl.forecast.layers import layers_of, root_weights
from prl.forecast.setting import BF16, Setting
from prl.forecast.sharding import dense_group, replica_group

# a parameter: what is read and written in float32. Clipping is a norm, and a multiplication that AdamW does on the way
NORM_BYTES, CLIP_BYTES, ADAMW_BYTES, MUON_BYTES = 4, 8, 28, 24
NEWTON_SCHULZ_STEPS = 5
MUON_TRAVELS = 4  # bytes a number: rows to the matrix' owner and back, in bfloat16


def trained_parameters(s: Setting) -> tuple[float, float]:
    """A rank's share of (all trained parameters, those that Muon has). Of LoRA's adapters, nothing is counted."""
    if s.frozen:
        return 0.0, 0.0
    ranks = s.mesh.fsdp_island
    total = sum(count * (layer.dense + layer.experts) for count, layer in layers_of(s)) + root_weights(s.card)
    of_muon = 0.0
    if s.config.optim.type == "muon":
        of_muon = float(sum(count * sum(a * b for a, b in layer.matrices) for count, layer in layers_of(s)))
    return total / ranks, of_muon / ranks


def optimizer_step(s: Setting) -> Cost:
    mine, of_muon = trained_parameters(s)
    end = Cost({"steps": s.hardware.seconds("steps", 1)})
    if not mine:
        return end
    rest = mine - of_muon
    offload = s.config.memory_recipe.optim_cpu_offload
    clipped = mine if offload or s.before else of_muon
    cost = end + s.memory(mine * NORM_BYTES + clipped * CLIP_BYTES + rest * ADAMW_BYTES + of_muon * MUON_BYTES)
    if of_muon:
        cost += muon(s)
    if s.config.memory_recipe.fsdp_cpu_offload or offload == "full":
        return end + Cost({"host_adamw": s.hardware.seconds("host_adamw", mine)})
    if offload:
        moments = (2 * rest + of_muon) * 4
        cost += Cost({"host_link": s.hardware.seconds("host_link", moments)}, {("moments", HOST): 2 * moments})
    return cost


def muon(s: Setting) -> Cost:
    """Products of whole matrices, dealt over the island's ranks, or over replicas without FSDP, which send each other
    the updates; the exchange hides behind them, or shows.
    """
    replicas = s.alone and s.mesh.dp_replicate > 1
    group, hardware = replica_group(s) if replicas else dense_group(s), s.hardware
    flops, numbers = 0.0, 0.0
    shapes: Counter[tuple[int, ...]] = Counter()
    for count, layer in layers_of(s):
        for shape in layer.matrices:
            shapes[shape] += count
    for (rows, columns), count in shapes.items():
        short, long = min(rows, columns), max(rows, columns)
        each = NEWTON_SCHULZ_STEPS * (4 * short**2 * long + 2 * short**3)
        flops += each * max(1.0, count / group.ranks)  # a matrix is whole on one rank
        numbers += count * rows * columns
    products = hardware.seconds("muon", flops)
    if group.ranks == 1:
        return Cost({"muon": products})
    sent = numbers / group.ranks * MUON_TRAVELS * (group.ranks - 1) / group.ranks
    if replicas:
        sent = numbers / group.ranks * BF16 * (group.ranks - 1)
    outside = sent * (group.ranks - group.near) / (group.ranks - 1)
    times = {
        "nvlink_all_to_all": hardware.seconds("nvlink_all_to_all", sent - outside),
        "nic": hardware.seconds("nic", outside),
    }
    slower = max(times, key=times.__getitem__)
    traffic = {("Muon's rows", link): n for link, n in ((NVLINK, sent - outside), (NIC, outside)) if n}
    return Cost({"muon": products, slower: max(0.0, times[slower] - products)}, traffic)
