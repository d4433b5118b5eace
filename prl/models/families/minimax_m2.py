"""MiniMax-M2: grouped-query attention that turns the first part of each head and norms all heads of a token together;
experts in every layer, chosen by sigmoid scores with a correction.
"""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.experts.routing import Choice
from prl.models.layers.attention import Attention
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.mlp import SparseMLP
from prl.models.names.decoder import Names


class MiniMaxM2(Decoder):
    names = Names(
        mlp="block_sparse_moe", gate="w1", up="w3", down="w2", bias="e_score_correction_bias", has_more_layers=True
    )

    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        experts = SparseMLP(card, index, Choice.of(card, "sigmoid"), corrected=True)
        return DecoderLayer(card, Attention(card, index, qk_norm="all"), experts)
