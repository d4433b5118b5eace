"""Between the parameter names of checkpoints and those of our decoders (`transformers.py`: of those of
transformers).

They differ in the prefix `model.`, in the experts, which a checkpoint stores one by one and we stack, and in what a
family says in its `Names`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.names.region import Region

BIAS = "router_bias"


@dataclass(frozen=True)
class Names:
    """What a family's checkpoints call otherwise."""

    prefix: str = "model."  # of all but the LM head
    mlp: str = "mlp"  # of a layer
    gate: str | None = "gate_proj"  # of an expert; None: it has none
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"  # of a router's choice
    has_more_layers: bool = False  # behind the card's: they predict further tokens, and are passed over


HUGGING_FACES = Names()


def locate(hf_name: str, card: ModelCard, names: Names = HUGGING_FACES) -> Region | None:
    """The region that a checkpoint tensor fills; None for one that this model does not hold: a tied LM head, layers
    behind the last that predict further tokens.
    """
    if names.has_more_layers and hf_name.startswith("mtp."):
        return None
    if hf_name == "lm_head.weight":
        return None if card.tie_word_embeddings else Region("lm_head.weight")
    name = hf_name.removeprefix(names.prefix)
    layer = re.match(r"layers\.(\d+)\.", name)
    if names.has_more_layers and layer and int(layer[1]) >= card.num_hidden_layers:
        return None
    name = _parts(name, card) if card.hybrid_override_pattern else name.replace(f".{names.mlp}.", ".mlp.", 1)
    expert = re.fullmatch(r"(layers\.\d+\.mlp\.experts)\.(\d+)\.(\w+)\.weight", name)
    if expert is None:
        return Region(name.replace(f".mlp.{names.bias}", f".mlp.{BIAS}"))
    stack, index, kind = expert[1], int(expert[2]), expert[3]
    if kind == names.down:
        return Region(f"{stack}.down_proj", index)
    if names.gate is None:
        return Region(f"{stack}.up_proj", index)
    size = card.moe_intermediate_size
    return Region(f"{stack}.gate_up_proj", index, (0, size) if kind == names.gate else (size, 2 * size))


def to_hf(name: str, tensor: Tensor, card: ModelCard, names: Names = HUGGING_FACES) -> Iterator[tuple[str, Tensor]]:
    """One whole parameter of ours -> its checkpoint tensors (views)."""
    if name == "lm_head.weight" or not card.is_native:
        yield name, tensor
        return
    theirs = single_mixers(name) if card.hybrid_override_pattern else name.replace(".mlp.", f".{names.mlp}.", 1)
    theirs = names.prefix + theirs
    if name.endswith("experts.gate_up_proj"):
        stack, size = theirs.removesuffix(".gate_up_proj"), card.moe_intermediate_size
        for expert in range(card.num_experts):
            yield f"{stack}.{expert}.{names.gate}.weight", tensor[expert, :size]
            yield f"{stack}.{expert}.{names.up}.weight", tensor[expert, size:]
    elif name.endswith(("mlp.experts.down_proj", "mlp.experts.up_proj")):
        stack, _, kind = theirs.rpartition(".")
        for expert in range(card.num_experts):
            yield f"{stack}.{expert}.{names.down if kind == 'down_proj' else names.up}.weight", tensor[expert]
    elif name.endswith(f".{BIAS}"):
        yield f"{theirs.removesuffix(BIAS)}{names.bias}", tensor
    else:
        yield theirs, tensor


# --- layers that do one thing each ------------------------------------------------------------------------------------

_PARTS = {"M": "mamba", "*": "self_attn", "E": "mlp", "-": "mlp"}  # letters of the pattern -> where we hold it
_OUTER = {"embed_tokens.weight": "embeddings.weight", "norm.weight": "norm_f.weight"}  # ours -> theirs
_DECAY = ("A_log", "D", "dt_bias")  # in a module of their own here


def single_mixers(name: str) -> str:
    """Our name of a parameter -> that of such a checkpoint, which calls whatever a layer does its `mixer`."""
    layer = re.fullmatch(r"(layers\.\d+)\.(\w+)\.(.+)", name)
    if layer is None:
        return _OUTER.get(name, name)
    prefix, part, rest = layer.groups()
    if part.endswith("_layernorm"):
        return f"{prefix}.norm.{rest}"
    return f"{prefix}.mixer.{rest.removeprefix('decay.')}"


def _parts(name: str, card: ModelCard) -> str:
    """The inverse."""
    layer = re.fullmatch(r"layers\.(\d+)\.(norm|mixer)\.(.+)", name)
    if layer is None or int(layer[1]) >= card.num_hidden_layers:
        return {theirs: ours for ours, theirs in _OUTER.items()}.get(name, name)
    part = _PARTS[card.hybrid_override_pattern[int(layer[1])]]
    if layer[2] == "norm":
        part = "post_attention_layernorm" if part == "mlp" else "input_layernorm"
    return f"layers.{layer[1]}.{part}.{'decay.' * (layer[3] in _DECAY)}{layer[3]}"
