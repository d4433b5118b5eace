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
HEAD = "lm_head.weight"
MTP = "mtp."  # of layers that predict further tokens, where they are no further `layers`
MTP_MARK = "eh_proj"  # where they are: what only they have, the projection of a hidden state beside the next embedding
COMPUTED = ".rotary_emb.inv_freq"  # in files of old versions of transformers


@dataclass(frozen=True)
class Names:
    """What a family's checkpoints call otherwise."""

    prefix: str = "model."  # of all but the LM head
    mlp: str = "mlp"  # of a layer
    gate: str | None = "gate_proj"  # of an expert; None: it has none
    up: str = "up_proj"
    down: str = "down_proj"
    bias: str = "gate.e_score_correction_bias"  # of a router's choice
    has_more_layers: bool = False  # behind the card's: they predict further tokens, and are kept aside
    wrapper: str = ""  # before all names where the model is the text part of a larger one
    beside: tuple[str, ...] = ()  # how the names of that one's other parts begin


HUGGING_FACES = Names()


def locate(hf_name: str, card: ModelCard, names: Names = HUGGING_FACES) -> Region | None:
    """The region that a checkpoint tensor fills; None for one that this model does not hold: a tied LM head, layers
    behind the last that predict further tokens, other parts of a larger model.
    """
    own = own_name(hf_name, names)
    if own is None or is_further(own, card, names) or own.endswith(COMPUTED):
        return None
    hf_name = own
    if hf_name == HEAD:
        return None if card.tie_word_embeddings else Region(HEAD)
    name = hf_name.removeprefix(names.prefix)
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


def own_name(hf_name: str, names: Names = HUGGING_FACES) -> str | None:
    """What a tensor is called in a checkpoint of this model alone; None for those of other parts of a larger model."""
    return None if hf_name.startswith(names.beside) else hf_name.removeprefix(names.wrapper)


def is_further(hf_name: str, card: ModelCard, names: Names = HUGGING_FACES) -> bool:
    """Whether a tensor belongs to layers that predict further tokens (MTP): behind the last, or by themselves."""
    if not names.has_more_layers:
        return False
    layer = re.match(r"layers\.(\d+)\.", hf_name.removeprefix(names.prefix))
    return hf_name.startswith(MTP) or (layer is not None and int(layer[1]) >= card.num_hidden_layers)


def to_hf(name: str, tensor: Tensor, card: ModelCard, names: Names = HUGGING_FACES) -> Iterator[tuple[str, Tensor]]:
    """One whole parameter of ours -> its checkpoint tensors (views)."""
    if name == HEAD or not card.is_native:
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
