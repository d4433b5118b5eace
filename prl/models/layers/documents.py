"""What the layers of a model attend with over packed documents, for the trainer."""

from __future__ import annotations

import torch

from prl.config.schema import ModelCard
from prl.models.layers.attention import Attend
from prl.models.layers.hybrid import HybridAttend
from prl.models.layers.packed_attention import AttentionImpl, packed_attention
from prl.models.layers.packed_sparse_attention import PackedSparseAttention
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.models.state_space.documents import mix_documents


def attend_documents(
    card: ModelCard,
    doc_lens: list[int],
    device: torch.device,
    impl: AttentionImpl = "auto",
    prefixes: SharedPrefixes | None = None,
) -> Attend:
    """Causal, inside each document; doc_lens sum to N tokens; `impl` and `prefixes` as for `packed_attention`. States
    do not know prefixes.
    """
    assert prefixes is None or not card.state_layers
    if card.index_topk:
        return PackedSparseAttention(doc_lens, card, device, prefixes)
    attend = packed_attention(doc_lens, device, impl, prefixes)
    return HybridAttend(attend, mix_documents(doc_lens, device)) if card.state_layers else attend
