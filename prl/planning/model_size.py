"""How many parameters a model of a card has, and how many of them work on one token."""

from __future__ import annotations

from prl.config.families import FAMILIES
from prl.config.schema import ModelCard


def parameter_count(card: ModelCard) -> int:
    """Of a family that prl/models has, all; of another one what the card tells."""
    hidden, layers, sparse = card.hidden_size, card.num_hidden_layers, len(card.sparse_layers)
    embeddings = card.vocab_size * hidden * (1 if card.tie_word_embeddings else 2)
    experts = card.num_experts * (_mlp(card, card.moe_intermediate_size) + hidden)
    norms = (2 * layers + 1) * hidden
    mlps = sparse * (experts + _shared(card)) + (layers - sparse) * _mlp(card, card.intermediate_size)
    indexers = len(set(card.choosing_layers)) * _indexer(card) if card.index_topk else 0
    return layers * _attention(card) + indexers + mlps + norms + embeddings


def active_parameters(card: ModelCard) -> int:
    """That multiply one token: projections, its experts, the router and the LM head.

    Not the embedding (a lookup) nor norms and biases (O(hidden) work).
    """
    hidden, sparse = card.hidden_size, len(card.sparse_layers)
    experts = card.num_experts_per_tok * _mlp(card, card.moe_intermediate_size) + hidden * card.num_experts
    dense = (card.num_hidden_layers - sparse) * _mlp(card, card.intermediate_size)
    return (
        card.num_hidden_layers * _projections(card)
        + sparse * (experts + _shared(card))
        + dense
        + hidden * card.vocab_size
    )


def _attention(card: ModelCard) -> int:
    q, kv = card.num_attention_heads * card.head_dim, card.num_key_value_heads * card.head_dim
    family = FAMILIES.get(card.family)
    if card.kv_lora_rank:
        biases = card.q_lora_rank + card.kv_lora_rank + card.qk_rope_head_dim + card.hidden_size
        return _projections(card) + card.q_lora_rank + card.kv_lora_rank + biases * card.attention_bias
    norms = {"none": 0, "head": 2 * card.head_dim, "all": q + kv}[family.qk_norm if family else "none"]
    biases = q + 2 * kv + (card.hidden_size if family and family.output_bias else 0)
    return _projections(card) + norms * card.use_qk_norm + biases * card.attention_bias


def _indexer(card: ModelCard) -> int:
    """Of sparse attention: queries, one key with its norm, and weights of its heads."""
    queries, dim = card.q_lora_rank * card.index_n_heads * card.index_head_dim, card.index_head_dim
    return queries + card.hidden_size * (dim + card.index_n_heads) + 2 * dim


def _projections(card: ModelCard) -> int:
    """q, k, v and o."""
    if card.kv_lora_rank:
        heads, hidden, rank = card.num_attention_heads, card.hidden_size, card.kv_lora_rank
        read = card.q_lora_rank or hidden  # by what makes the queries
        queries = hidden * card.q_lora_rank + read * heads * card.head_dim
        values = hidden * (rank + card.qk_rope_head_dim) + rank * heads * (card.qk_nope_head_dim + card.v_head_dim)
        return queries + values + heads * card.v_head_dim * hidden
    return 2 * card.hidden_size * card.head_dim * (card.num_attention_heads + card.num_key_value_heads)


def _mlp(card: ModelCard, intermediate: int) -> int:
    return 3 * card.hidden_size * intermediate


def _shared(card: ModelCard) -> int:
    return card.n_shared_experts * _mlp(card, card.moe_intermediate_size)
