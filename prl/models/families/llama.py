"""Llama 3 (arXiv:2407.21783), and what is built like it: grouped-query attention without norms, SwiGLU."""

from __future__ import annotations

from prl.config.schema import ModelCard
from prl.models.layers.attention import Attention
from prl.models.layers.decoder import Decoder, DecoderLayer
from prl.models.layers.mlp import DenseMLP


class Llama(Decoder):
    @classmethod
    def layer(cls, card: ModelCard, index: int) -> DecoderLayer:
        attention = Attention(card, index, qk_norm=None, output_bias=card.attention_bias)
        return DecoderLayer(card, attention, DenseMLP(card.hidden_size, card.intermediate_size))
