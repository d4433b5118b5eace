"""Latent attention to the keys that an indexer chose (DeepSeek-V3.2, arXiv:2512.02556; sharing of choices between
layers: arXiv:2603.12201). Always in the absorbed form: all heads of a query see the same latents.
"""

from __future__ import annotations

from torch import Tensor

from prl.config.schema import ModelCard
from prl.models.layers.indexer import Indexer
from prl.models.layers.latent_attention import LatentAttention
from prl.models.layers.rope import Rotation


class SparseLatentAttention(LatentAttention):
    def __init__(self, card: ModelCard, layer_idx: int, turn: Rotation) -> None:
        """turn: of the indexer; its family's, for attention itself turns pairs in both."""
        super().__init__(card, layer_idx)
        self.form = "absorbed"
        if layer_idx not in card.shared_index_layers:
            self.indexer = Indexer(card, turn)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """x [N, H] -> q [N, Hq, C + R], k [N, 1, C + R], v [N, 1, C]; then what the indexer makes, if there is one."""
        q_latent = self.q_latent(x)
        attended = self.absorb(*self.compress(x, q_latent, cos, sin))
        return (*attended, *self.indexer(x, q_latent, cos, sin)) if hasattr(self, "indexer") else attended
