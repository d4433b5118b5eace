"""DeepSeek-V3 (arXiv:2412.19437), the text models of Kimi-K2 (arXiv:2507.20534), and GLM-4.7-Flash: latent attention;
dense first layers, then experts chosen in groups by sigmoid scores with a correction, beside shared ones.
"""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.experts.routing import Choice
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.latent_attention import LatentAttention
from prl.models.layers.mlp import DenseMLP, SparseMLP
from prl.models.names.decoder import Names


class DeepseekV3(Decoder):
    names = Names(
        has_more_layers=True,
        wrapper="language_model.",  # Kimi-K2.5, which sees
        beside=("vision_tower.", "mm_projector."),
    )

    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        return DecoderLayer(card, LatentAttention(card, index), cls.mlp(card, index))

    @staticmethod
    def mlp(card: ModelCard, index: int) -> DenseMLP | SparseMLP:
        if index in card.sparse_layers:
            return SparseMLP(card, index, Choice.of(card, "sigmoid"), corrected=True)
        return DenseMLP(card.hidden_size, card.intermediate_size)
