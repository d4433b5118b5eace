"""The group `model`: a card of architecture facts, which weights, which code runs them."""

from __future__ import annotations

from math import inf
from typing import Literal

from pydantic import BaseModel, ConfigDict, model_validator

from prl.config.schema_fields import (
    DirectoryOrName,
    Group,
    LayerPattern,
    Layers,
    NonNegative,
    NonNegativeFloat,
    Number,
    Positive,
    PositiveFloat,
    RotaryPart,
    Seed,
)

FamilyName = Literal[
    "llama", "qwen3", "qwen3_moe", "glm4_moe", "minimax_m2", "deepseek_v3", "glm4_moe_lite", "deepseek_v32",
    "glm_moe_dsa", "nemotron_h", "other",
]  # fmt: skip
CpStyle = Literal["ulysses", "ring", "gather"]


BETA_FAST, BETA_SLOW = 32.0, 1.0  # of yarn, where nothing is said


class RopeScaling(BaseModel):
    """How rotary embeddings are stretched beyond the context that they were trained with, in the words of config.json.

    linear: positions divided by `factor` (arXiv:2306.15595). llama3: slow frequencies divided, fast ones kept, those
    between blended (Llama 3, arXiv:2407.21783). yarn: arXiv:2309.00071.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rope_type: Literal["linear", "llama3", "yarn"]
    factor: PositiveFloat
    original_max_position_embeddings: Positive | None = None
    low_freq_factor: PositiveFloat | None = None  # llama3
    high_freq_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None  # yarn; turns within the old context from which a frequency is kept
    beta_slow: PositiveFloat | None = None  # and up to which it is divided
    mscale: Number | None = None
    mscale_all_dim: Number | None = None
    attention_factor: PositiveFloat | None = None
    truncate: bool | None = None

    @model_validator(mode="after")
    def blends(self) -> RopeScaling:
        """Between bounds that are the right way round: each implementation makes something else of others."""
        if self.rope_type == "llama3" and not (self.low_freq_factor or inf) < (self.high_freq_factor or 0):
            raise ValueError("llama3 needs low_freq_factor, and high_freq_factor above it")
        if self.rope_type == "yarn" and (self.beta_fast or BETA_FAST) < (self.beta_slow or BETA_SLOW):
            raise ValueError(f"beta_fast ({BETA_FAST:g} unless said) is at least beta_slow ({BETA_SLOW:g})")
        return self


OLD_CONTEXT = "original_max_position_embeddings"
STRETCHED = ("llama3", "yarn", "longrope")  # types of scaling that go by the context from before


class ModelCard(Group):
    """Architecture facts that rules and the plan need before any checkpoint is opened.

    For a model without `path` the card *is* the architecture; for one with a path, the checkpoint's config.json must
    agree. `prl/config/families.py` says which of the optional facts a family has.
    """

    family: FamilyName
    num_hidden_layers: Layers
    hidden_size: Positive
    num_attention_heads: Positive
    num_key_value_heads: Positive
    head_dim: Positive
    attention_bias: bool = False  # of q, k and v; of `Family.output_bias` of o, too
    use_qk_norm: bool = True
    intermediate_size: NonNegative = 0
    num_experts: NonNegative = 0
    num_experts_per_tok: NonNegative = 0
    moe_intermediate_size: NonNegative = 0
    n_shared_experts: NonNegative = 0  # as wide as so many experts, seen by every token
    moe_shared_expert_intermediate_size: NonNegative = 0  # of the shared ones together, where it is not that of experts
    moe_latent_size: NonNegative = 0  # experts see so many numbers of a token, made from the hidden state; 0: all of it
    mlp_only_layers: tuple[NonNegative, ...] = ()  # of a mixture of experts, the layers that are dense
    norm_topk_prob: bool = True
    routed_scaling_factor: PositiveFloat = 1.0  # of the mixing weights
    n_group: Positive = 1  # of experts; a token goes to those of its best topk_group groups alone
    topk_group: Positive = 1
    router_dtype: Literal["float32", "model"] = "float32"  # of routers' logits; model: rounded to the model's dtype
    vocab_size: Positive
    max_position_embeddings: Positive = 4096
    rope_theta: PositiveFloat = 10000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: RotaryPart = 1.0  # of each head, from its first dimension on; 0: no rotation
    # latent attention (arXiv:2405.04434): keys and values of all heads are made from so many numbers of a token; 0: not
    kv_lora_rank: NonNegative = 0
    q_lora_rank: NonNegative = 0  # queries, too; 0: straight from the hidden state
    qk_nope_head_dim: NonNegative = 0  # of head_dim, what is not turned by position: the first part
    qk_rope_head_dim: NonNegative = 0  # what is
    v_head_dim: NonNegative = 0
    # sparse attention (arXiv:2512.02556): a query attends to so many keys, the best by an indexer's scores; 0: to all
    index_topk: NonNegative = 0
    index_n_heads: NonNegative = 0
    index_head_dim: NonNegative = 0
    shared_index_layers: tuple[NonNegative, ...] = ()  # those that attend to what the last layer before them chose
    # of layers that do one thing each, what: M state space, * attention, E experts, - MLP; empty: attention, then MLP
    hybrid_override_pattern: LayerPattern = ""
    mamba_num_heads: NonNegative = 0  # state space (Mamba-2, arXiv:2405.21060)
    mamba_head_dim: NonNegative = 0
    mamba_n_groups: NonNegative = 0  # of heads, with one B and one C each
    ssm_state_size: NonNegative = 0  # numbers of state behind each number of a head
    conv_kernel: NonNegative = 0  # tokens that the convolution before it sees
    rms_norm_eps: PositiveFloat = 1e-6
    tie_word_embeddings: bool = False
    cp_styles: tuple[CpStyle, ...] = ("ulysses", "ring")
    ac_targets: tuple[str, ...] = ()

    @property
    def sparse_layers(self) -> list[int]:
        """Those with experts."""
        if self.hybrid_override_pattern:
            return self.layers_of("E")
        return [i for i in range(self.num_hidden_layers) if self.num_experts and i not in self.mlp_only_layers]

    @property
    def dense_layers(self) -> list[int]:
        """Those with an MLP instead."""
        if self.hybrid_override_pattern:
            return self.layers_of("-")
        return [i for i in range(self.num_hidden_layers) if i not in self.sparse_layers]

    @property
    def attention_layers(self) -> list[int]:
        """Those with attention."""
        return self.layers_of("*") if self.hybrid_override_pattern else list(range(self.num_hidden_layers))

    @property
    def state_layers(self) -> list[int]:
        """Those with a state-space recurrence."""
        return self.layers_of("M")

    def layers_of(self, kind: str) -> list[int]:
        """Those with this letter in the pattern."""
        return [i for i, letter in enumerate(self.hybrid_override_pattern) if letter == kind]

    @property
    def shared_intermediate_size(self) -> int:
        """Of the experts that every token sees, together."""
        return self.moe_shared_expert_intermediate_size or self.n_shared_experts * self.moe_intermediate_size

    @property
    def expert_width(self) -> int:
        """Numbers of a token that experts see."""
        return self.moe_latent_size or self.hidden_size

    @property
    def has_dense_mlps(self) -> bool:
        """Whether some layer has an MLP that every token sees."""
        return bool(self.dense_layers) or self.n_shared_experts > 0

    @property
    def choosing_layers(self) -> list[int]:
        """Of every layer, the one whose choice of keys it attends to."""
        own = [i for i in range(self.num_hidden_layers) if i not in self.shared_index_layers]
        return [max(i for i in own if i <= layer) for layer in range(self.num_hidden_layers)]

    @property
    def is_native(self) -> bool:
        """Whether prl/models has layers for it; transformers' own otherwise."""
        return self.family != "other"

    @property
    def pinned_scaling(self) -> RopeScaling | None:
        """With the context from before, for which a card that does not say it has its own."""
        scaling = self.rope_scaling
        if scaling is None or scaling.original_max_position_embeddings or scaling.rope_type not in STRETCHED:
            return scaling
        return scaling.model_copy(update={"original_max_position_embeddings": self.max_position_embeddings})

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head that rotary embeddings turn."""
        return self.qk_rope_head_dim or int(self.head_dim * self.partial_rotary_factor)

    @property
    def value_dim(self) -> int:
        """Of one head's values; head_dim is that of its queries and keys."""
        return self.v_head_dim or self.head_dim

    @property
    def cached_per_token(self) -> int:
        """Numbers that a cache holds of one token in one layer; a layer that shares its choice of keys has fewer."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim + self.index_head_dim
        return 2 * self.num_key_value_heads * self.head_dim


class ModelConfig(Group):
    """Group `model`: which weights, which code runs them."""

    name: str
    path: DirectoryOrName | None = (
        None  # Hugging Face checkpoint directory or hub id; None: random weights made from the card
    )
    tokenizer: DirectoryOrName | None = (
        None  # directory or hub id; None: the one at `path`; "byte": the built-in byte-level one, unless there is one
    )
    impl: Literal["auto", "custom", "hf"] = "auto"
    attn: Literal["auto", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"  # compute dtype; master weights are always float32
    fp8: Literal["none", "deep_gemm", "emulated"] = "none"  # block-scaled training GEMMs; emulated: same rounding, slow
    router_bias_update_rate: NonNegativeFloat = 0.0  # aux-loss-free load balancing (arXiv:2408.15664); 0: off
    indexer_loss_coef: NonNegativeFloat = 0.0  # of sparse attention's indexers' own loss; 0: they stay as they are
    init_seed: Seed = (
        0  # of the random weights when path is None; not seed, so that runs of all seeds begin with the same
    )
    card: ModelCard
