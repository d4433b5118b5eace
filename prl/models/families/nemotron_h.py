"""Nemotron-H (arXiv:2504.03624) and Nemotron 3: layers that do one thing each, as the pattern of the card says:
Mamba-2, attention without positions, an MLP, or experts chosen by sigmoid scores with a correction, which may work on
latents, beside a shared one. MLPs and experts have no gate and square their ReLU.
"""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.experts.routing import Choice
from prl.models.layers.attention import Attention
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.hybrid import StateSpaceLayer
from prl.models.layers.mlp import SparseMLP, SquaredReluMLP
from prl.models.names.decoder import Names


class NemotronH(Decoder):
    names = Names(prefix="backbone.", gate=None, has_more_layers=True)

    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        kind = card.hybrid_override_pattern[index]
        if kind == "M":
            return StateSpaceLayer(card, index)
        if kind == "*":
            return DecoderLayer(card, Attention(card, index, qk_norm=None), None)
        if kind == "E":
            choice = Choice.of(card, "sigmoid")
            return DecoderLayer(card, None, SparseMLP(card, index, choice, corrected=True, gated=False))
        return DecoderLayer(card, None, SquaredReluMLP(card.hidden_size, card.intermediate_size))
