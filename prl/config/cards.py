"""Model cards, and the config.json of Hugging Face checkpoints."""

from __future__ import annotations

from typing import Any

from prl.config.schema import ModelCard

ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}


def card_to_hf_config(card: ModelCard) -> dict[str, Any]:
    """The config.json with which transformers builds the same architecture."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[card.family]],
        "model_type": card.family,
        "attention_bias": False,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "dtype": "float32",
        **card.model_dump(exclude={"family", "cp_styles", "ac_targets", "num_experts", "num_experts_per_tok",
                                   "moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"}),
    }  # fmt: skip
    if card.family == "qwen3_moe":
        config |= {
            "num_experts": card.num_experts,
            "num_experts_per_tok": card.num_experts_per_tok,
            "moe_intermediate_size": card.moe_intermediate_size,
            "norm_topk_prob": card.norm_topk_prob,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(card.mlp_only_layers),
        }
    return config
