"""A card's model."""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.families.qwen3 import Qwen3
from prl.models.layers.decoder import Decoder

FAMILIES: dict[str, type[Decoder]] = {"qwen3": Qwen3, "qwen3_moe": Qwen3}


def build_decoder(card: ModelCard) -> Decoder:
    """With parameters on the default device, not yet filled."""
    return FAMILIES[card.family](card)
