"""How many parameters a model of a card has, and how many of them work on one token."""

from __future__ import annotations

from prl.config.families import FAMILIES
from prl.config.schema import ModelCard


def parameter_count(card: ModelCard) -> int:
    """Of a family that prl/models has, all; of another one what the card tells."""
    hidden, layers, sparse = card.hidden_size, card.num_hidden_layers, len(card.sparse_layers)
    embeddings = card.vocab_size * hidden * (1 if card.tie_word_embeddings else 2)
    experts = card.num_experts * (_expert(card) + hidden)
    norms = ((1 if card.hybrid_override_pattern else 2) * layers + 1) * hidden
    mlps = sparse * (experts + _around_experts(card)) + len(card.dense_layers) * _mlp(card, card.intermediate_size)
    states = len(card.state_layers) * (_state_projections(card) + _state_vectors(card))
    indexers = len(set(card.choosing_layers)) * _indexer(card) if card.index_topk else 0
    return len(card.attention_layers) * _attention(card) + indexers + states + mlps + norms + embeddings


def expert_parameters(card: ModelCard) -> int:
    """Of all routed experts, which expert parallelism spreads."""
    return len(card.sparse_layers) * card.num_experts * _expert(card)


def active_parameters(card: ModelCard) -> int:
    """That multiply one token: projections, its experts, the router and the LM head.

    Not the embedding (a lookup) nor norms and biases (O(hidden) work).
    """
    hidden, sparse = card.hidden_size, len(card.sparse_layers)
    experts = card.num_experts_per_tok * _expert(card) + hidden * card.num_experts
    return (
        len(card.attention_layers) * _projections(card)
        + len(card.state_layers) * _state_projections(card)
        + sparse * (experts + _around_experts(card))
        + len(card.dense_layers) * _mlp(card, card.intermediate_size)
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


def matrices_per_mlp(card: ModelCard) -> int:
    """Of an MLP or an expert."""
    family = FAMILIES.get(card.family)
    return 3 if family is None or family.gated else 2


def _mlp(card: ModelCard, intermediate: int) -> int:
    return matrices_per_mlp(card) * card.hidden_size * intermediate


def _expert(card: ModelCard) -> int:
    return matrices_per_mlp(card) * (card.expert_width) * card.moe_intermediate_size


def _around_experts(card: ModelCard) -> int:
    """The shared ones, and the way to the latent and back."""
    return _mlp(card, card.shared_intermediate_size) + 2 * card.hidden_size * card.moe_latent_size


def _state_projections(card: ModelCard) -> int:
    """Of a state-space layer, and its convolution."""
    inner = card.mamba_num_heads * card.mamba_head_dim
    channels = inner + 2 * card.mamba_n_groups * card.ssm_state_size
    projections = card.hidden_size * (2 * inner + channels + card.mamba_num_heads)
    return projections + channels * card.conv_kernel


def _state_vectors(card: ModelCard) -> int:
    """The convolution's biases, the norm, and of each head its rate, its step and what passes the state by."""
    inner = card.mamba_num_heads * card.mamba_head_dim
    return 2 * inner + 2 * card.mamba_n_groups * card.ssm_state_size + 3 * card.mamba_num_heads
