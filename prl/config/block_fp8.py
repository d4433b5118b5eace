"""`inference.quantization=fp8_block`: engines whose matrices are e4m3 in blocks of 128x128 with a float32 scale each
(DeepSeek-V3's format, arXiv:2412.19437, section 3.3), quantised by the trainer and sent so.
"""

from __future__ import annotations

from typing import Any

from prl.config.families import FAMILIES
from prl.config.schema import ModelCard, RunConfig

BLOCK_FP8 = "fp8_block"
BLOCK = 128
SCALE = "_scale_inv"  # behind a matrix's name, in checkpoints and on the wire
# last names of the matrices that are quantised, as checkpoints call them: what attention, MLPs and experts multiply by.
# Embeddings, heads, routers and indexers are what they were.
QUANTISED = frozenset(
    (
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"),
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    )
)
# of a layer, what vLLM would quantise as well; it compares whole names
KEPT = (
    "mlp.gate",
    "block_sparse_moe.gate",
    "self_attn.indexer.wq_b",
    "self_attn.indexer.wk",
    "self_attn.indexer.weights_proj",
)


def sends_blocks(config: RunConfig) -> bool:
    return config.inference.quantization == BLOCK_FP8


def engine_dtype(config: RunConfig) -> str:
    """In which engines compute."""
    return config.model.dtype if config.inference.dtype == "auto" else config.inference.dtype


def to_sixteen_bits(config: RunConfig) -> str:
    """What is to be said beside a format of 8 bits, whose products vLLM has in 16 bits: an override, or nothing."""
    return " inference.dtype=bfloat16" if engine_dtype(config) == "float32" else ""


def is_quantised(name: str) -> bool:
    """Of a checkpoint's tensor, by its name."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and module.rpartition(".")[2] in QUANTISED


def quantization_config(card: ModelCard) -> dict[str, Any]:
    """What config.json says of such weights, in the words of published checkpoints."""
    kept = [f"model.layers.{layer}.{name}" for layer in range(card.num_hidden_layers) for name in KEPT]
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", *kept],
    }


def has_blocks(card: ModelCard) -> bool:
    """Whether its matrices have the names above: of families with layers here, but for those of state spaces."""
    return card.is_native and not FAMILIES[card.family].is_hybrid


def odd_sizes(card: ModelCard, tp: int, expert_tp: int) -> dict[str, int]:
    """Sizes that vLLM cannot cut into whole blocks, by what they are of: it joins matrices and splits them over `tp`
    devices, experts over `expert_tp`.
    """
    sizes: dict[str, int] = {"the hidden state": card.hidden_size}
    if card.kv_lora_rank:
        heads = card.num_attention_heads // tp
        sizes["latents of keys and values"] = card.kv_lora_rank
        sizes["queries of a device"] = heads * card.head_dim
        sizes["keys and values of a device"] = heads * (card.qk_nope_head_dim + card.v_head_dim)
        sizes["what attention gives on a device"] = heads * card.v_head_dim
        if card.q_lora_rank:
            sizes["latents of queries"] = card.q_lora_rank
    else:
        sizes["queries of a device"] = card.num_attention_heads // tp * card.head_dim
        sizes["keys of a device"] = max(card.num_key_value_heads // tp, 1) * card.head_dim
    if card.dense_layers:
        sizes["an MLP's part on a device"] = card.intermediate_size // tp
    if card.num_experts:
        sizes["an expert's part on a device"] = card.moe_intermediate_size // expert_tp
        if card.shared_intermediate_size:
            sizes["the shared experts' part on a device"] = card.shared_intermediate_size // tp
    return {what: size for what, size in sizes.items() if size % BLOCK}
