"""What rules, plans and readers of config.json need to know of a family of models. Its layers are in
prl/models/families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from prl.config.schema_model import CpStyle, FamilyName

NOTHING: Mapping[str, Any] = MappingProxyType({})
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "norm_topk_prob")
DEEPSEEK_ROUTER = (*EXPERTS, "n_shared_experts", "routed_scaling_factor", "n_group", "topk_group")
INDEX = ("index_topk", "index_n_heads", "index_head_dim")
HYBRID = (
    "hybrid_override_pattern", "mamba_num_heads", "mamba_head_dim", "mamba_n_groups", "ssm_state_size", "conv_kernel",
)  # fmt: skip
OWN_EXPERTS = ("moe_latent_size", "moe_shared_expert_intermediate_size")
LATENT = ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
GATED_DENSE, GATED_EXPERTS = ("norm", "act", "attn_proj", "mlp"), ("norm", "act", "attn_proj", "moe")
HYBRID_EXPERTS = (*GATED_EXPERTS, "scan")

OPTIONAL = (
    *DEEPSEEK_ROUTER,
    *LATENT,
    *INDEX,
    "shared_index_layers",
    *HYBRID,
    *OWN_EXPERTS,
    "attention_bias",
    "use_qk_norm",
    "rope_scaling",
    "partial_rotary_factor",
)


@dataclass(frozen=True)
class Family:
    """One `model_type` of config.json."""

    architecture: str  # the class of transformers and vLLM
    has: tuple[str, ...] = ()  # optional facts of the card that say something of it
    always: Mapping[str, Any] = field(default_factory=lambda: NOTHING)  # facts that config.json does not spell out
    keys: Mapping[str, str] = field(default_factory=lambda: NOTHING)  # the card's name of a fact -> config.json's
    # what transformers takes where config.json is silent, as far as the card's own defaults are others
    silent: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    # what config.json says where it says it: what the layers are built for, and nothing else
    builds: Mapping[str, tuple[Any, ...]] = field(default_factory=lambda: NOTHING)
    # what transformers takes for one of these where config.json is silent, if that is another
    assumed: Mapping[str, Any] = field(default_factory=lambda: NOTHING)
    writes: Mapping[str, Any] = field(default_factory=lambda: NOTHING)  # what engines want to read besides
    dense_first: bool = False  # config.json counts the dense layers, which are the first (first_k_dense_replace)
    lists_layers: bool = False  # it says of each layer whether it is dense (mlp_layer_types)
    qk_norm: Literal["none", "head", "all"] = "head"  # where the card has norms of queries and keys
    output_bias: bool = False  # attention_bias is of o_proj, too
    corrected: bool = False  # checkpoints have a correction of the router's choice
    gated: bool = True  # MLPs and experts are of three matrices (SwiGLU), not of two
    cp_styles: tuple[CpStyle, ...] = ("ulysses", "ring")
    ac_targets: tuple[str, ...] = GATED_DENSE
    vllm_ties: bool = True  # vLLM's model knows a head that is the embedding
    vllm_off_cpus: str = ""  # why vLLM 0.32 cannot run it on CPUs, where it cannot
    router_key: str = ""  # config.json's key by which vLLM's routers compute their logits in float32

    def router_facts(self, router_dtype: str) -> Mapping[str, str]:
        """What config.json says of the type of routers' logits to engines that ask."""
        return {self.router_key: router_dtype} if self.router_key and router_dtype == "float32" else {}

    @property
    def is_latent(self) -> bool:
        """Whether its attention is multi-head latent attention."""
        return "kv_lora_rank" in self.has

    @property
    def is_sparse(self) -> bool:
        """Whether its attention sees the keys alone that an indexer chose."""
        return "index_topk" in self.has

    @property
    def is_hybrid(self) -> bool:
        """Whether its layers do one thing each: state space, attention, experts or an MLP."""
        return "hybrid_override_pattern" in self.has

    @property
    def is_ours_alone(self) -> bool:
        """Whether transformers' code of its layers cannot keep packed documents apart, so impl=hf is no way out."""
        return self.is_sparse or self.is_hybrid

    @property
    def has_experts(self) -> bool:
        return "num_experts" in self.has


SILU = {"hidden_act": ("silu",)}
NO_WINDOW = {"use_sliding_window": (False, None)}
NO_LIMIT = ([0.0, float("inf")], (0.0, float("inf")), [0.0, {"__float__": "Infinity"}])  # as JSON has it, or not
# keys of routers that files of several families have, and that transformers passes over: its layers are built for the
# values below, whatever config.json says
UNREAD = ("scoring_func", "topk_method", "qk_norm_type", "use_qk_norm")
SIGMOID = {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
NO_SPARSE = "its sparse attention is for GPUs"
DEEPSEEK_SILENT: Mapping[str, Any] = {
    "n_shared_experts": 1,
    "mlp_only_layers": (0, 1, 2),
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        has=("attention_bias", "rope_scaling"),
        always={"use_qk_norm": False},
        qk_norm="none",
        output_bias=True,
        builds={**SILU, "mlp_bias": (False,)},
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM",
        has=("rope_scaling",),
        silent={"head_dim": 128, "num_key_value_heads": 32},
        builds={**SILU, **NO_WINDOW, "attention_bias": (False,)},
        writes={"attention_bias": False, "use_sliding_window": False},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM",
        has=(*EXPERTS, "rope_scaling"),
        silent={"norm_topk_prob": False, "num_key_value_heads": 4},
        builds={**SILU, **NO_WINDOW, "attention_bias": (False,), "decoder_sparse_step": (1,)},
        writes={"attention_bias": False, "use_sliding_window": False, "decoder_sparse_step": 1},
        ac_targets=GATED_EXPERTS,
    ),
    "glm4_moe": Family(
        "Glm4MoeForCausalLM",
        has=(*DEEPSEEK_ROUTER, "attention_bias", "use_qk_norm", "rope_scaling", "partial_rotary_factor"),
        keys={"num_experts": "n_routed_experts"},
        silent={
            "use_qk_norm": False,
            "num_key_value_heads": 8,
            "n_shared_experts": 1,
            "mlp_only_layers": (0,),
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        builds={**SILU, **SIGMOID},
        writes={"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        dense_first=True,
        corrected=True,
        ac_targets=GATED_EXPERTS,
        vllm_ties=False,
    ),
    "minimax_m2": Family(
        "MiniMaxM2ForCausalLM",
        has=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "rope_scaling", "partial_rotary_factor"),
        keys={"num_experts": "num_local_experts", "moe_intermediate_size": "intermediate_size"},
        silent={"head_dim": 128, "num_key_value_heads": 8, "rope_theta": 5e6},
        builds={**SILU, "scoring_func": ("sigmoid",), "qk_norm_type": ("per_layer",), "use_qk_norm": (True,)},
        writes={"scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True},
        qk_norm="all",
        corrected=True,
        ac_targets=GATED_EXPERTS,
        vllm_ties=False,
        vllm_off_cpus="its router for CPUs knows softmax only, unless experts are in groups",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        has=(*DEEPSEEK_ROUTER, *LATENT, "attention_bias", "rope_scaling"),
        always={"use_qk_norm": False},
        keys={"num_experts": "n_routed_experts"},
        silent=DEEPSEEK_SILENT,
        builds={**SILU, **SIGMOID, "rope_interleave": (True,)},
        writes={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
        dense_first=True,
        qk_norm="none",
        output_bias=True,
        corrected=True,
        cp_styles=("ulysses", "ring", "gather"),
        ac_targets=GATED_EXPERTS,
        vllm_ties=False,
        router_key="moe_router_dtype",
    ),
    "glm4_moe_lite": Family(
        "Glm4MoeLiteForCausalLM",
        has=(*DEEPSEEK_ROUTER, *LATENT, "attention_bias", "rope_scaling"),
        always={"use_qk_norm": False},
        keys={"num_experts": "n_routed_experts"},
        silent={
            "n_shared_experts": 1,
            "mlp_only_layers": (0,),
            "routed_scaling_factor": 1.8,
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rms_norm_eps": 1e-5,
        },
        builds={**SILU, **SIGMOID, "rope_interleave": (True,)},
        writes={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
        dense_first=True,
        lists_layers=True,
        qk_norm="none",
        output_bias=True,
        corrected=True,
        cp_styles=("ulysses", "ring", "gather"),
        ac_targets=GATED_EXPERTS,
        vllm_ties=False,
    ),
    "deepseek_v32": Family(
        "DeepseekV32ForCausalLM",
        has=(*DEEPSEEK_ROUTER, *LATENT, *INDEX, "attention_bias", "rope_scaling"),
        always={"use_qk_norm": False},
        keys={"num_experts": "n_routed_experts"},
        silent={**DEEPSEEK_SILENT, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128},
        builds={**SILU, **SIGMOID, "rope_interleave": (True,), "mlp_bias": (False,)},
        writes={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": True},
        dense_first=True,
        lists_layers=True,
        qk_norm="none",
        output_bias=True,
        corrected=True,
        cp_styles=("gather",),
        ac_targets=GATED_EXPERTS,
        vllm_ties=False,
        vllm_off_cpus=NO_SPARSE,
        router_key="moe_router_dtype",
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM",
        has=(*DEEPSEEK_ROUTER, *LATENT, *INDEX, "shared_index_layers", "attention_bias", "rope_scaling"),
        always={"use_qk_norm": False},
        keys={"num_experts": "n_routed_experts"},
        silent={
            "n_shared_experts": 1,
            "mlp_only_layers": (0, 1, 2),
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "index_topk": 2048,
            "index_n_heads": 32,
            "index_head_dim": 128,
            "rms_norm_eps": 1e-5,
        },
        builds={
            **SILU,
            **SIGMOID,
            "rope_interleave": (True,),
            "indexer_rope_interleave": (True,),
            "mlp_bias": (False,),
        },
        writes={
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_interleave": True,
            "indexer_rope_interleave": True,
        },
        dense_first=True,
        lists_layers=True,
        qk_norm="none",
        output_bias=True,
        corrected=True,
        cp_styles=("gather",),
        ac_targets=GATED_EXPERTS,
        vllm_ties=False,
        vllm_off_cpus=NO_SPARSE,
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        has=(
            *(key for key in DEEPSEEK_ROUTER if key not in ("mlp_only_layers", "n_shared_experts")),
            *OWN_EXPERTS,
            *HYBRID,
        ),
        always={"use_qk_norm": False, "n_shared_experts": 1, "partial_rotary_factor": 0.0},
        keys={"num_experts": "n_routed_experts", "mamba_n_groups": "n_groups", "rms_norm_eps": "layer_norm_epsilon"},
        silent={
            "hybrid_override_pattern": "ME*-",
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21504,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "mamba_n_groups": 8,
            "ssm_state_size": 128,
            "conv_kernel": 4,
            "rms_norm_eps": 1e-5,
        },
        builds={
            "mlp_hidden_act": ("relu2",),
            "mamba_hidden_act": ("silu",),
            "attention_bias": (False,),
            "mlp_bias": (False,),
            "use_bias": (False,),
            "mamba_proj_bias": (False,),
            "use_conv_bias": (True,),
            "n_shared_experts": (1,),
            "tie_word_embeddings": (False,),
            "sliding_window": (None,),
            "residual_in_fp32": (False,),
            "time_step_limit": NO_LIMIT,
        },
        writes={
            "hidden_act": "relu2",
            "mlp_hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "use_bias": False,
            "mamba_proj_bias": False,
            "use_conv_bias": True,
            "n_shared_experts": 1,
            "chunk_size": 128,
            "mamba_ssm_cache_dtype": "float32",
        },
        qk_norm="none",
        corrected=True,
        gated=False,
        cp_styles=("ulysses",),
        ac_targets=HYBRID_EXPERTS,
        vllm_off_cpus="its experts without gates and its prefills in pieces, which states want, are for GPUs",
    ),
}


def family_of(name: FamilyName) -> Family | None:
    """None for families that transformers' own code runs."""
    return FAMILIES.get(name)
