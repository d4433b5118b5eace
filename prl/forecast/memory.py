"""Peak bytes of a trainer rank, the most loaded one: what it holds from step to step, and the worst moment of a step.

A step is followed layer by layer from the last back to the first: activations of those before it are still there,
sharded gradients of those behind it already. The head's backward comes before all of them, the embedding's and the
optimizer's step after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from prl.config.world import fsdp_units
from prl.forecast.layers import Layer, end_weights, layers_in_order, root_weights
from prl.forecast.optimizing import trained_parameters
from prl.forecast.recipe import apply_recipe, offloaded
from prl.forecast.setting import BF16, FLOAT32, Setting
from prl.forecast.sharding import EXPERTS, dense_group, layer_units, reduced_bytes

GIB = 2.0**30
AUTO_CHUNK_TOKENS = 8192  # prl/trainer/head/head.py
WHOLE_HEAD_KEPT = 18  # bytes a logit: bfloat16, and four times float32
WAITING_CHUNKS = 2  # of "auto" (same place); where a size is given, one
OFFLOAD_BUCKETS = 3 * (512 << 20)  # moments on the device at once (prl/trainer/memory/optimizer_offload.py)
GRADIENTS_LEAVING = 512 << 20  # gradients on their way to the host at once (same place)

Bytes = dict[str, float]


@dataclass(frozen=True)
class Peak:
    """Bytes by what holds them, at the moment at which there are the most."""

    moment: str
    parts: Bytes

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def peak_memory(s: Setting, micro_batches: int = 1) -> Peak:
    """Of several micro-batches the later ones count, which find the gradients of the first."""
    held = {**states(s), "gathered root": root_of(s)}
    moment, parts = max(moments(s, micro_batches > 1), key=lambda found: sum(found[1].values()))
    reserve = {"reserve": s.hardware.constants.reserve_gib * GIB}
    return Peak(moment, {name: n for name, n in {**held, **parts, **reserve}.items() if n})


def moments(s: Setting, has_gradients: bool) -> Iterator[tuple[str, Bytes]]:
    """(when, bytes beside those of `states`)."""
    layers = layers_in_order(s)
    most = most_gradients(s)
    all_gradients = min(most, trained_parameters(s)[0] * FLOAT32)
    root, end = 0.0 if s.frozen else root_of(s), end_weights(s)
    made, leaving = (0, 0) if s.frozen else (end * BF16, end * reduced_bytes(s, dense_group(s)))
    resident = not s.config.parallelism.reshard_after_forward
    first_kept = len(layers) - offloaded(s.config.memory_recipe, len(layers))
    recipes = {id(layer): apply_recipe(s, layer) for layer in layers}
    kept = [recipes[id(layer)].kept * s.tokens for layer in layers]
    cast = [recipes[id(layer)].cast * BF16 if s.casts else 0.0 for layer in layers]
    on_device = [sum(kept[max(0, i + 1 - first_kept) : i + 1]) for i in range(len(layers))]
    units = units_of(s, layers)
    gathered = [sum(gathered_bytes(s, layers[i]) for i in unit) for unit in units]
    whole = sum(gathered) if resident else 0.0
    yield (
        "the head's backward",
        {"activations": on_device[-1], "cast weights": sum(cast), "head": head_bytes(s), "gathered head": end * BF16,
         "its gradient": made,
         "gradients of root": root, "gathered layers": whole or gathered[-1],
         "gradients": all_gradients if has_gradients else 0.0},
    )  # fmt: skip
    share = 0.0 if s.frozen else FLOAT32 / s.mesh.fsdp_island
    behind = end * share
    for at, i in reversed([(at, i) for at, unit in enumerate(units) for i in unit]):
        layer, recipe = layers[i], recipes[id(layers[i])]
        inner = (recipe.whole - recipe.kept + largest(layer)) * s.tokens
        gradients = [(0.0, 0.0) if s.frozen else whole_gradients(s, layers[j]) for j in units[at]]
        made_here = sum(mine for mine, _ in gradients[i - units[at].start :])
        leaving_here = sum(copied for _, copied in gradients)
        before = leaving if at == len(units) - 1 else 0.0  # what is reduced leaves when the next of its kind comes
        yield (
            f"layer {i}'s backward",
            {"activations": on_device[i], "cast weights": sum(cast[:i]), "layer in backward": inner,
             "gathered layers": whole or gathered[at] + (gathered[at - 1] if at else 0.0),
             "its gradients": made_here + leaving_here, "gradients of root": root,
             "the head's gradient": max(0.0, before - leaving_here),
             "gradients": all_gradients if has_gradients else min(most, behind)},
        )  # fmt: skip
        if i == units[at].start:
            behind += sum(layers[j].dense + layers[j].experts for j in units[at]) * share
    yield (
        "the embedding's backward",
        {"its gradient": made + leaving, "gradients of root": root,
         "gradients": all_gradients if has_gradients else min(most, behind)},
    )  # fmt: skip
    passing = moments_of(s) if s.config.memory_recipe.optim_cpu_offload is True else 0.0
    yield "the optimizer's step", {"gradients": all_gradients, "moments": min(passing, OFFLOAD_BUCKETS)}


def root_of(s: Setting) -> int:
    """Bytes that stay gathered, and of their gradients, which are all reduced at the end: not of a last norm alone."""
    return 0 if end_weights(s) else root_weights(s.card) * BF16


def states(s: Setting) -> Bytes:
    """Masters and moments; frozen weights are in the model's dtype."""
    recipe = s.config.memory_recipe
    everything = sum(layer.dense + layer.experts for layer in layers_in_order(s)) + root_weights(s.card)
    mine, _ = trained_parameters(s)
    if s.frozen:
        return {"frozen weights": everything / s.mesh.fsdp_island * BF16}
    if recipe.fsdp_cpu_offload:
        return {}
    if recipe.optim_cpu_offload == "full":
        return {"weights": mine * BF16}
    return {"masters": mine * FLOAT32, **({} if recipe.optim_cpu_offload else {"moments": moments_of(s)})}


def moments_of(s: Setting) -> float:
    """The optimizer's, in float32: two a parameter of AdamW, one of Muon and SGD."""
    mine, of_muon = trained_parameters(s)
    return (mine if s.config.optim.type == "sgd" else 2 * mine - of_muon) * FLOAT32


def largest(layer: Layer) -> float:
    """Bytes a token of gradients under way: as many as the part that keeps the most."""
    return max(part.kept for part in layer.parts)


def units_of(s: Setting, layers: list[Layer]) -> list[range]:
    """Layers that are gathered and reduced together; one at a time without FSDP, and before there were units."""
    sizes = [layer.dense + (0 if s.experts_alone else layer.experts) for layer in layers]
    return fsdp_units(sizes, experts_apart=s.alone or s.before or (s.mesh.ep > 1 and not s.experts_alone))


def gathered_bytes(s: Setting, layer: Layer) -> float:
    return sum(size for what, size, _ in layer_units(s, layer) if not stays(s, what)) * BF16


def stays(s: Setting, what: str) -> bool:
    """Whether FSDP has nothing to do with these weights: a product casts them, and makes their gradient, by itself."""
    return what == EXPERTS and s.experts_alone


def whole_gradients(s: Setting, layer: Layer) -> tuple[float, float]:
    """As backward makes them, and the copy that is reduced."""
    units = [unit for unit in layer_units(s, layer) if not stays(s, unit[0])]
    return sum(size for _, size, _ in units) * BF16, sum(size * reduced_bytes(s, group) for _, size, group in units)


def most_gradients(s: Setting) -> float:
    """Bytes of reduced gradients that the device has at most: where the host steps, those that are on their way."""
    recipe = s.config.memory_recipe
    if recipe.fsdp_cpu_offload:
        return 0.0
    return GRADIENTS_LEAVING if recipe.optim_cpu_offload == "full" else math.inf


def head_bytes(s: Setting) -> float:
    chunk = s.config.memory_recipe.fused_lm_head_token_chunk_size
    if chunk == "disabled":
        return s.tokens * s.card.vocab_size * WHOLE_HEAD_KEPT
    size = AUTO_CHUNK_TOKENS if chunk == "auto" else chunk
    at_once = 2 * min(s.tokens, size) if s.before else waiting_tokens(s)
    return at_once * s.card.vocab_size * BF16 + 2 * s.tokens * s.card.hidden_size * BF16


def waiting_tokens(s: Setting) -> float:
    """Of whose logits there are as many at once as wait for backward."""
    chunk = s.config.memory_recipe.fused_lm_head_token_chunk_size
    assert chunk != "disabled"
    size = AUTO_CHUNK_TOKENS if chunk == "auto" else chunk
    return min(s.tokens, size * (WAITING_CHUNKS if chunk == "auto" else 1))
