"""One micro-batch of a rank: forward, repetition, backward, and what of FSDP's collectives and of activations on their
way to the host stays visible.

Overlap: a layer's gather hides behind the layer before it, in backward gather and reduction behind one layer's
backward; what is longer shows. What hides them takes `contention` of their time longer. The embedding is gathered first
and reduced last, behind nothing; the head behind the last layer, or, tied to the embedding, with it. Tokens on their
way to experts, and heads or latents on their way between context ranks, hide behind nothing; the ring's keys behind its
blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from prl.forecast.cost import HOST, NOTHING, Cost
from prl.forecast.layers import Layer, end_weights, layers_in_order, layers_of, root_weights
from prl.forecast.memory import waiting_tokens
from prl.forecast.optimizing import trained_parameters
from prl.forecast.recipe import Recipe, apply_recipe, offloaded
from prl.forecast.setting import FLOAT32, Setting
from prl.forecast.sharding import (
    dense_group,
    gather_layer,
    gathered,
    reduce_layer,
    reduced,
    reduced_bytes,
    replica_group,
    ring,
)

# bytes of the whole head's kernels for each logit, forward and backward: the passes of log-softmax, entropy and their
# gradients in float32 (prl/trainer/head/head.py)
WHOLE_HEAD_BYTES = (46, 94)
CHUNKED_HEAD_BYTES = (4, 8)


@dataclass(frozen=True)
class Pass:
    """Costs of a micro-batch. Hidden collectives are in `hidden` alone: they take no time of their own."""

    forward: Cost = NOTHING
    repeated: Cost = NOTHING
    backward: Cost = NOTHING
    exposed: Cost = NOTHING  # FSDP's collectives and host copies that nothing hides, and what hidden ones cost others
    hidden: Cost = NOTHING

    def __add__(self, other: Pass) -> Pass:
        return Pass(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))

    def __mul__(self, times: float) -> Pass:
        return Pass(*(getattr(self, name) * times for name in self.__dataclass_fields__))

    @property
    def seconds(self) -> float:
        return sum(cost.total for cost in (self.forward, self.repeated, self.backward, self.exposed))


def micro_batch(s: Setting) -> Pass:
    """Of one rank, with gradients reduced."""
    layers = layers_of(s)
    whole = head(s) + root(s)
    for count, layer in layers:
        whole += one_layer(s, layer, s.card.num_hidden_layers) * count
    return whole


def step_end(s: Setting) -> Pass:
    """Once a step, whatever the number of micro-batches: gradients of replicas without FSDP, in buckets that are added
    up behind the last backward. Those of the embedding are made last, and show.
    """
    if not s.alone or s.frozen or s.mesh.dp_replicate == 1:
        return Pass()
    last = root_weights(s.card) - end_weights(s)
    layers, root = (_added_up(s, what, weights) for what, weights in (
        ("layers", trained_parameters(s)[0] - last), ("embedding", last)
    ))  # fmt: skip
    back = sum(
        count * (recipe.repeated.total + recipe.backward.total)
        for count, layer in layers_of(s)
        for recipe in (apply_recipe(s, layer),)
    )
    return Pass(
        backward=_local(layers) + _local(root), exposed=shown_of(s, layers, back) + _links(root), hidden=_links(layers)
    )


def _added_up(s: Setting, what: str, weights: float) -> Cost:
    """Copied into a bucket, from which the optimizer reads; out of one that is narrower they are cast."""
    number = reduced_bytes(s, dense_group(s))
    moved = FLOAT32 + number + (number + FLOAT32 if number < FLOAT32 else 0)
    return s.memory(weights * moved) + ring(s, f"DDP reductions, {what}", weights * number, replica_group(s)) * 2


def one_layer(s: Setting, layer: Layer, layers: int) -> Pass:
    recipe = apply_recipe(s, layer)
    gather, reduce = gather_layer(s, layer), reduce_layer(s, layer)
    ahead = recipe.forward.total
    back = recipe.repeated.total + recipe.backward.total
    repeats = s.config.memory_recipe.ac.mode == "full" if s.alone else s.config.parallelism.reshard_after_forward
    again = gather if repeats else NOTHING
    shown = shown_of(s, gather, ahead) + shown_of(s, again + reduce, back)
    host = host_copies(s, recipe, ahead, back) * (offloaded(s.config.memory_recipe, layers) / layers)
    local = _local(gather)
    return Pass(
        recipe.forward + local,
        recipe.repeated,
        recipe.backward + (local if again is gather else NOTHING) + _local(reduce),
        shown + host,
        _links(gather) + _links(again) + _links(reduce),
    )


def shown_of(s: Setting, collective: Cost, seconds: float) -> Cost:
    """What of a collective is longer than the work that hides it, and by how much it makes that work longer: by its
    bytes, over whichever link they go.
    """
    links = _links(collective)
    if not links.total:
        return NOTHING
    hidden = min(links.total, seconds) / links.total
    felt = hidden * s.hardware.constants.contention * s.hardware.seconds("nvlink_ring", sum(links.traffic.values()))
    return Cost((links * (1 - hidden)).seconds) + Cost({"nvlink_ring": felt})


def host_copies(s: Setting, recipe: Recipe, ahead: float, back: float) -> Cost:
    """Activations out while the layer after runs forward, and in while it runs backward."""
    nbytes = recipe.kept * s.tokens
    seconds = s.hardware.seconds("host_one_way", nbytes)
    shown = max(0.0, seconds - ahead) + max(0.0, seconds - back)
    return Cost({"host_one_way": shown}, {("activations out and in", HOST): 2 * nbytes})


def root(s: Setting) -> Pass:
    """Embedding and head: gathered before the first layer, reduced behind the last gradient; but a head that is a unit
    by itself behind the last layer.
    """
    end = end_weights(s)
    first, last = (unit(s, weights) for weights in (root_weights(s.card) - end, end))
    embedding = s.copies(2 * s.card.hidden_size, 4 * s.card.hidden_size)
    recipe = apply_recipe(s, layers_in_order(s)[-1])
    ahead, back = recipe.forward.total, recipe.repeated.total + recipe.backward.total
    shown = _links(first[0]) + _links(first[1]) + shown_of(s, last[0], ahead) + shown_of(s, last[1], back)
    return Pass(
        embedding[0] + _local(first[0]) + _local(last[0]),
        NOTHING,
        embedding[1] + _local(first[1]) + _local(last[1]),
        shown,
        _links(last[0]) + _links(last[1]),
    )


def unit(s: Setting, weights: float) -> tuple[Cost, Cost]:
    """Gathered, reduced."""
    gather = gathered(s, "embedding and head", weights, dense_group(s))
    return gather, NOTHING if s.frozen else reduced(s, "embedding and head", weights, dense_group(s))


def head(s: Setting) -> Pass:
    """Log-probability and entropy of all tokens; in chunks, logits are computed again in backward but for the last."""
    card, chunked = s.card, s.config.memory_recipe.fused_lm_head_token_chunk_size != "disabled"
    forward, backward = s.matmul(s.tokens, card.hidden_size, card.vocab_size, fp8=False)
    logits = s.tokens * card.vocab_size
    sizes = CHUNKED_HEAD_BYTES if chunked else WHOLE_HEAD_BYTES
    repeated = forward * (1 - waiting_tokens(s) / s.tokens) if chunked and not s.before else forward * chunked
    return Pass(forward + s.memory(logits * sizes[0]), repeated, backward + s.memory(logits * sizes[1]))


def _links(cost: Cost) -> Cost:
    return Cost({name: t for name, t in cost.seconds.items() if name != "memory"}, cost.traffic)


def _local(cost: Cost) -> Cost:
    return Cost({name: t for name, t in cost.seconds.items() if name == "memory"})
