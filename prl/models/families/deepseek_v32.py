"""DeepSeek-V3.2 (arXiv:2512.02556) and GLM-5: DeepSeek-V3's layers, whose attention sees the keys alone that an indexer
chose. GLM-5's indexers turn pairs of dimensions; in GLM-5.2 most layers share the choice of one before them.
"""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.families.deepseek_v3 import DeepseekV3
from prl.models.layers.decoder import DecoderLayer
from prl.models.layers.rope import Rotation, rotate, rotate_pairs
from prl.models.layers.sparse_latent_attention import SparseLatentAttention


class DeepseekV32(DeepseekV3):
    turn: Rotation = staticmethod(rotate)  # of indexers

    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        return DecoderLayer(card, SparseLatentAttention(card, index, cls.turn), cls.mlp(card, index))


class GlmMoeDsa(DeepseekV32):
    turn: Rotation = staticmethod(rotate_pairs)
