"""Rollouts: what the engines take for a batch. A decoding step reads weights and cache; prompts cost FLOPs."""

from __future__ import annotations

from dataclasses import dataclass

from prl.config.schema import ModelCard, RunConfig
from prl.config.world import takes_turns
from prl.forecast.cost import NOTHING, Cost
from prl.forecast.hardware import Hardware
from prl.forecast.layers import Layer, layers_of, root_weights
from prl.forecast.setting import BF16, FLOAT32, Setting
from prl.forecast.workload import Workload
from prl.planning.engine_memory import engine_share
from prl.planning.model_size import active_parameters
from prl.planning.run_plan import EnginePlan, RunPlan

WORKING_GIB = 12.0  # of an engine's GPU, beside weights and cache: activations, graphs, buffers
EXCHANGES = 2  # of a layer, over tensor-parallel ranks and over expert-parallel ones: each waits for the slowest


@dataclass(frozen=True)
class Rollouts:
    """Of one batch. bound_s: the shortest step for which the longest rollout is not dropped as too old."""

    seconds: float
    cost: Cost
    bound_s: float
    engines: int
    sequences: float  # at once in an engine
    limited_by: str
    step_s: float  # of one decoding step
    cache_gib: float  # of the sequences at once, on a GPU
    weights_gib: float  # on a GPU
    fits: bool  # weights, and the cache of one sequence at least


@dataclass(frozen=True)
class Fleet:
    """Engines of a kind, all alike."""

    engines: int
    tp: int
    dp: int

    @property
    def devices(self) -> int:
        return self.tp * self.dp


def rollouts_of(hardware: Hardware, plan: RunPlan, work: Workload) -> Rollouts | None:
    """None where no engines are the run's own."""
    decoding = fleet_of(plan, ("both", "decode"))
    if decoding is None or not work.completions:
        return None
    s = Setting(hardware, plan.config, work.laps[0])
    mean = sum(work.completions) / len(work.completions)
    context = work.prompt + mean / 2
    cache = cache_bytes(s, decoding, context)  # on average, for it grows block by block
    sequences, why = at_once(s, decoding, cache)
    step = decode_step(s, decoding, sequences, context)
    steps = sum(work.completions) / (decoding.engines * sequences)
    prefilling = fleet_of(plan, ("both", "prefill"))
    assert prefilling is not None
    prompts = prefill(s, prefilling, work)
    longest = max(work.completions) * step.total
    cost = step * steps
    if in_turn(plan.config) and longest > cost.total:  # who is left runs alone, with no more of them to come
        cost = step * max(work.completions)
    apart = fleet_of(plan, ("prefill",)) is not None
    whole = (cost if cost.total >= prompts.total else prompts) if apart else cost + prompts
    return Rollouts(
        whole.total,
        whole,
        longest / (plan.config.algo.max_off_policy_steps + 1),
        decoding.engines,
        sequences,
        why,
        step.total,
        cache * sequences / decoding.dp / 2**30,
        weight_bytes(s, decoding) / 2**30,
        room_for_cache(s, decoding) >= cache,
    )


def in_turn(config: RunConfig) -> bool:
    """Whether nothing is generated while the trainer works."""
    return takes_turns(config) or config.algo.max_off_policy_steps == 0


def fleet_of(plan: RunPlan, kinds: tuple[str, ...]) -> Fleet | None:
    found: dict[int, EnginePlan] = {}
    for role in plan.roles_of("inference"):
        if role.engine is not None and role.engine.kind in kinds:
            found.setdefault(role.engine.index, role.engine)
    if not found:
        return None
    first = next(iter(found.values()))
    return Fleet(len(found), first.tp, first.dp)


def at_once(s: Setting, fleet: Fleet, cache: float) -> tuple[float, str]:
    """Sequences of one engine at a time, and what limits them."""
    inference, algo = s.config.inference, s.config.algo
    room = room_for_cache(s, fleet)
    ahead = 0 if in_turn(s.config) else algo.max_off_policy_steps
    limits = {
        "inference.max_num_seqs": float(inference.max_num_seqs * fleet.dp),
        "inference.max_concurrent_rollouts": inference.max_concurrent_rollouts / fleet.engines,
        "algo.batch_size, algo.max_off_policy_steps": algo.batch_size * (ahead + 1) / fleet.engines,
        "memory for the cache": room / cache * fleet.dp if cache else float("inf"),
    }
    why = min(limits, key=limits.__getitem__)
    return max(1.0, limits[why]), why


def room_for_cache(s: Setting, fleet: Fleet) -> float:
    """Bytes on a GPU."""
    return s.hardware.memory_gib * 2**30 * engine_part(s.config) - weight_bytes(s, fleet) - WORKING_GIB * 2**30


def engine_part(config: RunConfig) -> float:
    """Of a GPU's memory, where an engine shares it."""
    return engine_share(config) if config.deployment.type == "colocated" else 1.0


def weight_bytes(s: Setting, fleet: Fleet) -> float:
    """On one GPU, bfloat16 (FP8 where the engine quantises)."""
    dense, experts = held(s, fleet)
    return (dense + experts) * number_bytes(s.config)


def held(s: Setting, fleet: Fleet) -> tuple[float, float]:
    """Parameters on one GPU: all but experts, and these."""
    layers: list[tuple[int, Layer]] = layers_of(s)
    dense = sum(count * layer.dense for count, layer in layers) + root_weights(s.card)
    experts = sum(count * layer.experts for count, layer in layers)
    wide = fleet.devices if s.config.inference.expert_parallel else fleet.tp
    return dense / fleet.tp, experts / wide


def number_bytes(config: RunConfig) -> int:
    return 1 if (config.inference.quantization or "").startswith("fp8") else BF16


def cache_bytes(s: Setting, fleet: Fleet, context: float) -> float:
    """Of one sequence on one GPU: keys and values of its share of heads, or the latent, which each rank has whole."""
    card = s.card
    shared = 1 if card.kv_lora_rank else min(fleet.tp, card.num_key_value_heads)
    states = len(card.state_layers) * card.mamba_num_heads * card.mamba_head_dim * card.ssm_state_size * FLOAT32
    shares = len(card.attention_layers) - index_layers(card) if card.index_topk else 0
    numbers = len(card.attention_layers) * card.cached_per_token - shares * card.index_head_dim
    return numbers * BF16 * context / shared + states / fleet.tp


def index_layers(card: ModelCard) -> int:
    """Layers with an indexer of their own, and so with its keys in their cache."""
    return len(set(card.choosing_layers))


def decode_step(s: Setting, fleet: Fleet, sequences: float, context: float) -> Cost:
    """One token for each sequence of an engine."""
    card, mine = s.card, sequences / fleet.dp
    dense, experts = held(s, fleet)
    touched = 1 - (1 - card.num_experts_per_tok / card.num_experts) ** sequences if card.num_experts else 0.0
    seen = cache_bytes(s, fleet, context)
    if card.index_topk:  # of latents those chosen, of index keys all
        few = min(context, card.index_topk) * (card.kv_lora_rank + card.qk_rope_head_dim)
        seen = BF16 * (card.num_hidden_layers * few + index_layers(card) * context * card.index_head_dim)
    nbytes = (dense + experts * touched) * number_bytes(s.config) + seen * mine
    flops = 2 * active_parameters(card) * sequences / fleet.devices
    reading = s.memory(nbytes)
    computing = Cost({"gemm_forward": s.hardware.seconds("gemm_forward", flops)})
    cost = max(reading, computing, key=lambda c: c.total)
    cost += Cost({"decode_overhead": s.hardware.seconds("decode_overhead", 1)})
    spread = (fleet.tp > 1) + (s.config.inference.expert_parallel and fleet.devices > 1)
    waits = card.num_hidden_layers * EXCHANGES * spread
    return cost + (Cost({"engine_exchanges": s.hardware.seconds("engine_exchanges", waits)}) if waits else NOTHING)


def prefill(s: Setting, fleet: Fleet, work: Workload) -> Cost:
    """A group's prompt once, where engines keep prefixes."""
    prompts = len(work.completions) / (s.config.algo.group_size if s.config.inference.prefix_caching else 1)
    flops = 2 * active_parameters(s.card) * prompts * work.prompt / (fleet.engines * fleet.devices)
    return Cost({"gemm_forward": s.hardware.seconds("gemm_forward", flops)})
