"""What transformers' own layers cannot do in a trainer, as far as a config.json says so (`model.impl=hf`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prl.config.errors import UserError
from prl.config.families import FAMILIES, Family
from prl.config.schema_model import OLD_CONTEXT, ModelConfig

KNOWN_LAYERS = {"full_attention", "sliding_attention"}
INDEXED_LAYERS = {"indexed_attention", "deepseek_sparse_attention", "qwen_sparse_attention"}
WITH_SINKS = ("gpt_oss",)  # model_type of those that always have them
WITHOUT_ATTENTION = ("falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm")  # and so without heads in config.json
# types of rotary scaling that go by a row's longest document, by the names that config.json has for them
SWITCHING = {"dynamic": "dynamic", "longrope": "longrope", "su": "longrope"}
# keys of a config that change the logits after the last matrix product, and the values that change nothing
NEUTRAL = {"final_logit_softcapping": (None,), "logit_scale": (None, 1.0), "logits_scaling": (None, 1.0)}


def is_transformers_code(model: ModelConfig) -> bool:
    """Whether trainers run transformers' layers, not those of prl/models."""
    return model.impl == "hf" or not model.card.is_native


def not_trainable(fields: Mapping[str, Any], where: str, row: int = 0) -> UserError | None:
    """Why transformers' layers of this config.json, of a language model, cannot be trained; None: it says nothing.

    A family's parts that only its class shows are seen when it is built.

    Args:
        row: tokens of a packed row, as far as known.
    """
    kind, layers = str(fields.get("model_type")), set(fields.get("layer_types") or ())
    family = FAMILIES.get(kind, Family(""))
    custom = "model.impl=custom" if kind in FAMILIES else ""
    if family.is_sparse or layers & INDEXED_LAYERS:
        return UserError(
            f"transformers' sparse attention of {kind} cannot separate packed documents.",
            where=where,
            why="an indexer chooses each query's keys, and transformers' lets it choose those of other documents",
            fix=custom or "a model with dense attention",
        )
    if is_bidirectional(fields):
        return sees_later_tokens(kind, where)
    for rope, limit in switching_ropes(fields):
        if rope == "dynamic" or row > limit:
            return switches(kind, rope, limit, where, f"rows have up to {row} tokens" if row > limit else "")
    odd = sorted(layers - KNOWN_LAYERS)
    if odd or "M" in str(fields.get("hybrid_override_pattern") or ""):
        return carries_state(kind, ", ".join(odd), where)
    if kind in WITH_SINKS:
        return has_sinks(kind, where)
    scaled = [key for key, neutral in NEUTRAL.items() if fields.get(key) not in neutral]
    if scaled:
        return UserError(
            f"{kind} changes its logits after the LM head: {', '.join(scaled)}.",
            where=where,
            why="losses are computed from hidden states and the LM head's weight",
            fix="a model without these, or a custom implementation in prl/models",
        )
    return None


def names_no_model(where: str) -> UserError:
    """where: the config.json."""
    return UserError(
        "config.json of the checkpoint names no family (model_type).",
        where=where,
        why="which layers a model has follows from it",
        fix=f"model_type in config.json: one of {', '.join(FAMILIES)}, or another that transformers has",
    )


def carries_state(kind: str, layers: str, where: str) -> UserError:
    """layers: what config.json calls them, where it does."""
    return UserError(
        f"{kind} has layers that cannot separate packed documents: {layers or 'they carry state'}.",
        where=where,
        why="only attention layers take part in packing; recurrent ones would carry state across documents",
        fix="a model with attention layers only" + (", or model.impl=custom" if kind in FAMILIES else ""),
    )


def has_sinks(kind: str, where: str) -> UserError:
    return UserError(
        f"{kind} has attention sinks, which are not supported.",
        where=where,
        why="the packed attention kernels do not know them",
        fix="another model",
    )


def switching_ropes(fields: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Types of rotary scaling that go by the longest position of what a forward pass sees, and the number of tokens up
    to which they take one set of frequencies.
    """
    sections = [fields.get(key) for key in ("rope_parameters", "rope_scaling")]
    found = []
    for section in (one for one in sections if isinstance(one, Mapping)):
        for part in (section, *section.values()):  # the second: of each type of layer
            rope = (part.get("rope_type") or part.get("type")) if isinstance(part, Mapping) else None
            if rope in SWITCHING:
                said = (fields.get(OLD_CONTEXT), part.get(OLD_CONTEXT), fields.get("max_position_embeddings"))
                found.append((SWITCHING[rope], next((old for old in said if old), 0)))
    return found


def switches(kind: str, rope: str, limit: int, where: str, told: str) -> UserError:
    return UserError(
        f"{kind} turns queries and keys by the longest document of a row (rope_type={rope}).",
        where=where,
        why="transformers chooses frequencies for the whole row" + (f" beyond {limit} tokens" if limit else "")
        + ", so log-probabilities of a document would depend on its neighbours" + (f"; {told}" if told else ""),
        fix=f"rows of at most {limit} tokens (seq_len={limit}), where its frequencies are always the same"
        if rope == "longrope" and limit
        else "another model"
        if rope == "longrope"
        else "remove it from config.json (rope_type=default) if sequences are never longer than "
        "max_position_embeddings, up to which it is the same; or another model",
    )  # fmt: skip


def is_bidirectional(fields: Mapping[str, Any]) -> bool:
    """Whether config.json turns a language model into an encoder. Of "vision" it is images alone that see ahead."""
    return fields.get("is_causal") is False or fields.get("use_bidirectional_attention") in (True, "all")


def sees_later_tokens(kind: str, where: str) -> UserError:
    return UserError(
        f"{kind} attends to later tokens, too.",
        where=where,
        why="a policy predicts the next token from those before it; attention here is causal",
        fix="a model of causal attention (config.json: is_causal, use_bidirectional_attention)",
    )


def attends_otherwise(kind: str, given: str, where: str) -> UserError:
    """given: what it hands to attention; nothing: it keeps something from it."""
    if given:
        what = f"{kind} has attention of its own: it hands on {given}."
        why = "documents of a row are kept apart by our attention, which knows scores, windows and caps alone"
    else:
        what = f"{kind} keeps the bounds of documents from its attention."
        why = "documents of a row are kept apart by our attention, which every layer has to tell them"
    return UserError(what, where=where, why=why, fix="another model, or a custom implementation in prl/models")
