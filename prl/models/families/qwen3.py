"""Qwen3, dense and mixture of experts (technical report, arXiv:2505.09388): grouped-query attention with normed queries
and keys, SwiGLU, or top-k softmax routing over SwiGLU experts.
"""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.experts.routing import Choice
from prl.models.layers.attention import Attention
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.mlp import DenseMLP, SparseMLP


class Qwen3(Decoder):
    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        sparse = index in card.sparse_layers
        mlp = SparseMLP(card, index, Choice.of(card)) if sparse else DenseMLP(card.hidden_size, card.intermediate_size)
        return DecoderLayer(card, Attention(card, index), mlp)
