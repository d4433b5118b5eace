"""The config.json of a checkpoint, against the card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.cards import card_to_hf_config
from prl.config.errors import UserError
from prl.config.schema import ModelCard


def check_card(path: Path, card: ModelCard) -> None:
    """Raise UserError unless the checkpoint's config.json agrees with the card."""
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"config.json of the checkpoint cannot be read: {error}",
            where=str(path / "config.json"),
            fix="model.path=/path/to/a/Hugging-Face/checkpoint",
        ) from error
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}  # as transformers 5 and 4 have it
    config |= rotary
    described = _described(card)
    wrong = [
        key
        for key, value in described.items()
        if key in config and config[key] != value and key not in ("architectures", "torch_dtype", "dtype")
    ]
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default" and card.family != "other":
        raise UserError(
            f"rotary embeddings of rope_type {kind} are not built here",
            where=str(path / "config.json"),
            why="the models of prl/models know the usual ones only",
            fix="model.impl=hf, or remove rope_scaling from config.json if sequences are short",
        )
    if wrong:
        raise UserError(
            "the model card does not describe this checkpoint: "
            + "; ".join(f"{key}: card {described[key]}, checkpoint {config[key]}" for key in wrong),
            where=f"model.card, {path / 'config.json'}",
            why="rules and plan are computed from the card",
            fix="another model= or model.path=; or, if this is the model that you want, "
            + " ".join(_override(key, config[key]) for key in wrong),
        )


def _override(key: str, value: Any) -> str:
    text = json.dumps(value, separators=(",", ":"))
    if key not in ModelCard.model_fields and key != "model_type":
        return f"({key}={text} cannot be changed)"
    return f"model.card.{'family' if key == 'model_type' else key}={value if isinstance(value, str) else text}"


def _described(card: ModelCard) -> dict[str, Any]:
    """What config.json must say; of another family's only what all families call the same."""
    if card.family != "other":
        return card_to_hf_config(card)
    same = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size")
    return card.model_dump(include={*same, "tie_word_embeddings"})
