"""Tiny cards of every family, and their references: transformers' own models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import tiny
import torch
from torch import Tensor

from prl.config.families import FAMILIES
from prl.config.schema import ModelCard

BASE: dict[str, Any] = {**tiny.BASE, "num_hidden_layers": 3}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
GLM = {**EXPERTS, "intermediate_size": 48, "mlp_only_layers": (0,), "n_shared_experts": 1,
       "partial_rotary_factor": 0.5, "routed_scaling_factor": 2.5}  # fmt: skip

LATENT = {**EXPERTS, "intermediate_size": 48, "mlp_only_layers": (0,), "n_shared_experts": 1, "use_qk_norm": False,
          "routed_scaling_factor": 2.5, "num_key_value_heads": 4, "head_dim": 12, "kv_lora_rank": 24, "q_lora_rank": 20,
          "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}  # fmt: skip
SPARSE: dict[str, Any] = {**LATENT, "index_topk": 8, "index_n_heads": 16, "index_head_dim": 8}  # documents are longer
DEEPSEEK_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32.0,
                 "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip

HYBRID: dict[str, Any] = {**EXPERTS, "intermediate_size": 48, "n_shared_experts": 1, "use_qk_norm": False,
          "partial_rotary_factor": 0.0, "routed_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 40,
          "mamba_num_heads": 8, "mamba_head_dim": 8, "mamba_n_groups": 4, "ssm_state_size": 16,
          "conv_kernel": 4, "rms_norm_eps": 1e-5}  # fmt: skip
SIZES: dict[str, tuple[str, dict[str, Any]]] = {  # id -> family, what its card has besides BASE
    "qwen3": ("qwen3", {"intermediate_size": 48}),
    "qwen3 yarn": ("qwen3", {"intermediate_size": 48, "rope_scaling": YARN}),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "llama": ("llama", {"intermediate_size": 48, "use_qk_norm": False}),
    "llama3 rope": ("llama", {"intermediate_size": 48, "use_qk_norm": False, "rope_scaling": LLAMA3}),
    "llama linear rope, biases, tied": (
        "llama",
        {"intermediate_size": 48, "use_qk_norm": False, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
         "attention_bias": True, "tie_word_embeddings": True},
    ),
    "glm4_moe": ("glm4_moe", {**GLM, "attention_bias": True, "use_qk_norm": False}),
    "glm4_moe normed, two shared, in groups": (
        "glm4_moe", {**GLM, "n_shared_experts": 2, "mlp_only_layers": (0, 1), "n_group": 4, "topk_group": 2}
    ),
    "minimax_m2": ("minimax_m2", {**EXPERTS, "partial_rotary_factor": 0.5}),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "n_group": 4, "topk_group": 2, "rope_scaling": DEEPSEEK_YARN}),
    "deepseek_v3 straight queries, biases, two dense": (
        "deepseek_v3", {**LATENT, "q_lora_rank": 0, "attention_bias": True, "mlp_only_layers": (0, 1)}
    ),
    "deepseek_v32": ("deepseek_v32", {**SPARSE, "n_group": 4, "topk_group": 2, "rope_scaling": DEEPSEEK_YARN}),
    "glm_moe_dsa": ("glm_moe_dsa", {**SPARSE}),
    "glm_moe_dsa shared choices": (
        "glm_moe_dsa", {**SPARSE, "num_hidden_layers": 5, "shared_index_layers": (1, 3, 4), "mlp_only_layers": (0, 1)}
    ),
    "glm4_moe_lite": ("glm4_moe_lite", {**LATENT, "v_head_dim": 12, "mlp_only_layers": (0,)}),
    "nemotron_h": (
        "nemotron_h", {**HYBRID, "num_hidden_layers": 6, "hybrid_override_pattern": "ME*-ME", "moe_latent_size": 24}
    ),
    "nemotron_h without latents, in groups": (
        "nemotron_h", {**HYBRID, "hybrid_override_pattern": "*EM", "n_group": 4, "topk_group": 2, "mamba_n_groups": 1,
                       "intermediate_size": 0}
    ),
    "nemotron_h without experts": (
        "nemotron_h",
        {**HYBRID, "num_hidden_layers": 4, "hybrid_override_pattern": "M-*-", "num_experts": 0,
         "num_experts_per_tok": 0, "moe_intermediate_size": 0, "moe_shared_expert_intermediate_size": 0},
    ),
}  # fmt: skip

# an id of each family, by which tests of all families go: a new row above is in all of them
EACH: dict[str, str] = {family: name for name, (family, _) in reversed(SIZES.items())} | {
    "llama": "llama3 rope",
    "glm_moe_dsa": "glm_moe_dsa shared choices",
}
ROUTED = tuple(EACH[family] for family in EACH if SIZES[EACH[family]][1].get("num_experts"))


def family_card(name: str, **changes: Any) -> ModelCard:
    """A tiny card by its id in `SIZES`."""
    family, sizes = SIZES[name]
    usual = {"ac_targets": FAMILIES[family].ac_targets, "cp_styles": FAMILIES[family].cp_styles}
    return ModelCard(**{"family": family, **BASE, **usual, **sizes, **changes})


def reference(path: Path) -> Any:
    """transformers' model of the checkpoint at `path`, in float32."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(str(path), dtype=torch.float32, attn_implementation="eager").eval()
    for module in lm.modules():
        if hasattr(
            module, "time_step_limit"
        ):  # transformers 5.23 takes the least step of the initialisation for a limit
            module.time_step_limit = (0.0, math.inf)  # as engines have it, and config.json
    return lm


def reference_logits(lm: Any, documents: list[Tensor]) -> Tensor:
    """Logits [T, V] of documents one at a time."""
    return torch.cat([lm(input_ids=ids[None], use_cache=False).logits[0] for ids in documents])
