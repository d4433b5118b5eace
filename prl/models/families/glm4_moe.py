"""GLM-4.5, 4.6 and 4.7 (arXiv:2508.06471): grouped-query attention with biases that turns the first part of each head,
dense first layers, then experts chosen by sigmoid scores with a correction, beside shared ones.
"""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.experts.routing import Choice
from prl.models.layers.attention import Attention
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.mlp import DenseMLP, SparseMLP
from prl.models.names.decoder import Names


class Glm4Moe(Decoder):
    names = Names(has_more_layers=True)

    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        attention = Attention(card, index, qk_norm="head" if card.use_qk_norm else None)
        sparse = index in card.sparse_layers
        mlp = (
            SparseMLP(card, index, Choice.of(card, "sigmoid"), corrected=True)
            if sparse
            else DenseMLP(card.hidden_size, card.intermediate_size)
        )
        return DecoderLayer(card, attention, mlp)
