"""What activation checkpointing and offloading make of a layer: what is repeated in backward, and what waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from prl.config.schema import MemoryConfig
from prl.forecast.cost import NOTHING, Cost, total
from prl.forecast.layers import Layer
from prl.forecast.parts import Part
from prl.forecast.setting import Setting

DEFAULT_TARGETS = ("norm", "act", "attn_proj")  # prl/trainer/memory/recompute.py
EVER_KEPT = ("choice",)  # whatever is repeated


@dataclass(frozen=True)
class Recipe:
    """Of one layer and micro-batch: its costs; bytes a token kept for backward, and those that one layer has while it
    runs backward, whatever was dropped before; weights of which cast copies are kept, where FSDP gathers none.
    """

    forward: Cost
    repeated: Cost
    backward: Cost
    kept: float
    whole: float
    cast: float


def apply_recipe(setting: Setting, layer: Layer) -> Recipe:
    ac = setting.config.memory_recipe.ac
    parts = layer.parts
    forward, backward = total(p.forward for p in parts), total(p.backward for p in parts)
    whole, weights = sum(p.kept for p in parts), sum(weights_of(setting, p) for p in parts)
    if ac.mode == "none":
        return Recipe(forward, NOTHING, backward, whole, whole, weights)
    if ac.mode == "full":
        kept = parts[0].kept + sum(p.kept for p in parts if p.name in EVER_KEPT)
        part = 1 / ac.freq
        repeated = total(p.repeated for p in parts) * part
        return Recipe(forward, repeated, backward, kept * part + whole * (1 - part), whole, weights * (1 - part))
    dropped = [p for p in parts if is_dropped(setting, p, ac.targets or DEFAULT_TARGETS)]
    kept = whole - sum(p.kept for p in dropped)
    cast = weights - sum(weights_of(setting, p) for p in dropped)
    return Recipe(forward, total(p.repeated for p in dropped), backward, kept, whole, cast)


def weights_of(setting: Setting, part: Part) -> int:
    """Those that are cast; experts in FP8 are quantised as they are."""
    return sum(prod(shape) for shape in part.weights if len(shape) < 3 or not setting.fp8)


def is_dropped(setting: Setting, part: Part, targets: tuple[str, ...]) -> bool:
    """By a selective target: of its whole block, or of its kind."""
    if part.name == "input":
        return False
    blocks = part.block.split()
    if "attn_proj" in blocks and "attn_proj" in targets:
        return True
    if "scan" in blocks and "scan" in targets:
        return True
    if {"mlp", "moe"} & set(targets) and {"mlp", "moe"} & set(blocks):
        return True
    if part.name == "norm" and "norm" in targets:  # compiled, it is inside what the compiler decides on
        return not setting.compiled or "moe" in blocks
    return "act" in targets and "act" in blocks


def offloaded(memory: MemoryConfig, layers: int) -> int:
    """Layers whose kept activations wait in host memory."""
    offload = memory.ac_offloading
    return max(0, layers - 1 - offload.max_inflight_activations) if offload.enabled else 0
