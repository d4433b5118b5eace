"""Inference engines as the configuration asks for them: groups of alike ones, and the processes of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

from prl.config.schema import EngineGroupConfig, RunConfig
from prl.config.world import World

EQUALS = 16  # tokens as probable as the last one of top_k, beyond it
EngineKind = Literal["both", "prefill", "decode"]


@dataclass(frozen=True)
class EngineGroup:
    """Engines of one kind. Each is a copy of the model for `dp` ranks of `tp` devices."""

    kind: EngineKind
    devices: int  # of all engines of the group
    tp: int
    dp: int
    own: EngineGroupConfig

    @property
    def width(self) -> int:
        """Devices of one engine."""
        return self.tp * self.dp

    @property
    def num_engines(self) -> int:
        return self.devices // self.width


@dataclass(frozen=True)
class EngineShare:
    """What one process has of an engine: data-parallel ranks `start_rank` to `start_rank + dp_local`."""

    start_rank: int
    dp_local: int
    serves: bool  # HTTP; else it only computes, and the engine's first process speaks for it


def learns_truncated(config: RunConfig) -> bool:
    """Whether training learns from truncated sampling, so that engines must say what tokens were drawn from."""
    trains = config.job == "rl" or (config.bench is not None and config.bench.target == "stack")
    return trains and config.inference.sampling.truncates(config.model.card.vocab_size)


def logprobs_of_kept(config: RunConfig) -> int:
    """How many of vLLM's logprobs show all of top_k: where several are equally probable it may keep all of them."""
    return min(config.inference.sampling.top_k + EQUALS, config.model.card.vocab_size)


def engine_groups(config: RunConfig, world: World) -> tuple[EngineGroup, ...]:
    """In the order of their devices: prefill first, when prefill and decode are apart."""
    prefill = config.inference.pd.num_prefill_gpus
    if prefill == 0:
        return (_group(config, "both", world.infer_devices),)
    return (_group(config, "prefill", prefill), _group(config, "decode", world.infer_devices - prefill))


def _group(config: RunConfig, kind: EngineKind, devices: int) -> EngineGroup:
    inference, own = config.inference, own_of(config, kind)
    return EngineGroup(kind, devices, own.tp or inference.tp, own.dp or inference.dp, own)


def engine_shares(config: RunConfig, world: World, group: EngineGroup) -> tuple[EngineShare, ...]:
    """The processes of one engine: one for each node that it spans, or for each rank where each is served by itself."""
    balancing = config.inference.dp_load_balancing
    local = group.dp
    if world.spans_nodes:
        local = min(group.dp, config.deployment.gpus_per_node // group.tp)
    if balancing == "external":
        local = 1
    starts = range(0, group.dp, local)
    return tuple(EngineShare(start, local, serves=balancing != "internal" or start == 0) for start in starts)


def most_on_a_node(config: RunConfig, world: World) -> int:
    """Processes of engines on the node that has the most: each has a port of its own. 0 where they do not fit."""
    deployment, used, on_node = config.deployment, 0, Counter[int]()
    per_node = deployment.gpus_per_node if world.spans_nodes else world.infer_devices
    for group in engine_groups(config, world):
        if group.tp > per_node:  # a rule of its own
            return 0
        for _ in range(group.num_engines):
            for share in engine_shares(config, world, group):
                on_node[used // per_node] += 1
                used += group.tp * share.dp_local
    return max(on_node.values(), default=0)


def own_of(config: RunConfig, kind: EngineKind) -> EngineGroupConfig:
    """What engines of this kind have otherwise than `inference` says."""
    pd = config.inference.pd
    return {"both": EngineGroupConfig(), "prefill": pd.prefill, "decode": pd.decode}[kind]


def vllm_arguments_of(config: RunConfig, kind: EngineKind) -> dict[str, Any]:
    """`inference.vllm`, and over it what the engine's own kind says."""
    return config.inference.vllm | own_of(config, kind).vllm
