"""The config.json of a checkpoint, against the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.auto_card import FREE, adapters_alone, cannot_be, meant_by
from prl.config.cards import facts_of, not_built, text_config
from prl.config.errors import UserError
from prl.config.families import FAMILIES, UNREAD
from prl.config.foreign import is_bidirectional, sees_later_tokens
from prl.config.keys import as_override
from prl.config.quantised import quantisation_of
from prl.config.schema import ModelCard, ModelConfig

FOREIGN = "model.impl=hf, with inference=vllm where there are engines"
OF_ALL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")


def read_config_json(path: Path) -> dict[str, Any]:
    """Raises UserError for one that cannot be read."""
    if (alone := adapters_alone(path)) is not None:
        raise alone
    try:
        return dict(json.loads((path / "config.json").read_text()))
    except (OSError, ValueError, TypeError) as error:
        usual = "the weights' shapes and names follow from it", "model.path=/path/to/a/Hugging-Face/checkpoint"
        why, fix = meant_by(path) or usual
        what = f"config.json of the checkpoint cannot be read: {error}"
        raise UserError(what, where=str(path / "config.json"), why=why, fix=fix) from error


def card_of_impl(model: ModelConfig) -> ModelCard:
    """What a checkpoint is held against where trainers, or engines that know more than prl/models, run it: with
    impl=hf it need have no layers of ours.
    """
    return model.card.model_copy(update={"family": "other"}) if model.impl == "hf" else model.card


def check_card(path: Path, card: ModelCard) -> None:
    """Raise UserError unless the checkpoint's config.json agrees with the card, and its weights can be read."""
    config = read_config_json(path)
    quantisation_of(config, path / "config.json")
    if is_bidirectional(text_config(config)):
        raise sees_later_tokens(str(text_config(config).get("model_type")), str(path / "config.json"))
    try:
        says = facts_of(config)
    except (ValueError, TypeError, KeyError) as error:
        raise cannot_be(path / "config.json", str(error)) from error
    if not card.is_native:  # of a family of transformers' only what all families call the same
        says = {key: says[key] for key in (*OF_ALL, "tie_word_embeddings") if key in says}
        if odd := {key: value for key, value in not_built(config).items() if key in UNREAD}:
            raise _has_other_parts(odd, str(text_config(config)["model_type"]), path / "config.json")
    elif odd := not_built(config):
        raise _has_other_parts(odd, card.family, path / "config.json")
    ours = {key: getattr(card, key) for key in says} | {"rope_scaling": card.pinned_scaling}
    wrong = [key for key, value in says.items() if key not in FREE and ours[key] != value]
    if wrong:
        raise UserError(
            "the model card does not describe this checkpoint: "
            + "; ".join(f"{key}: card {_text(ours[key])}, checkpoint {_text(says[key])}" for key in wrong),
            where=f"model.card, {path / 'config.json'}",
            why="rules and plan are computed from the card",
            fix="another model= or model.path=; or, if this is the model that you want, model=auto, or "
            + " ".join(f"model.card.{key}={_text(says[key])}" for key in wrong),
        )


def _has_other_parts(odd: dict[str, Any], family: str, file: Path) -> UserError:
    """odd: keys of config.json, and what they say."""
    unread = [key for key in odd if key in UNREAD]
    is_for_none = FAMILIES[family].is_ours_alone or odd.get("rope_type") == "dynamic" or unread  # `foreign.switches`
    fix = "another checkpoint" if is_for_none else FOREIGN
    if odd.get("rope_type") == "dynamic":  # no other type is the same as none up to there
        fix += ", or remove it from config.json (rope_type=default) if sequences are never longer than "
        fix += "max_position_embeddings"
    return UserError(
        "the checkpoint has what the layers of its family have not here: "
        + ", ".join(f"{key}={value}" for key, value in odd.items()),
        where=str(file),
        why=f"prl/models builds {family} without it"
        + f", and transformers does so, too, without a look at {', '.join(unread)}" * bool(unread),
        fix=fix,
    )


def _text(value: Any) -> str:
    return as_override(value)
