"""Model cards from the config.json of Hugging Face checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prl.config.families import FAMILIES, Family
from prl.config.schema_model import ModelCard, RopeScaling

# facts of the card that config.json has under the same name; of the optional ones, those of the family
COMMON = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
)
LISTS = ("mlp_only_layers", "shared_index_layers")  # of layers, which config.json tells in other ways
ROTARY = ("rope_theta", "rope_scaling", "partial_rotary_factor")
OTHER_NAMES = {  # a fact -> further names that checkpoints have for it
    "num_experts": ("n_routed_experts", "num_local_experts"),
    "num_key_value_heads": ("num_attention_heads",),
    "rms_norm_eps": ("layer_norm_epsilon",),
    "mamba_n_groups": ("mamba_n_groups",),
    "conv_kernel": ("mamba_d_conv",),
}


def card_to_hf_config(card: ModelCard) -> dict[str, Any]:
    """The config.json with which transformers and vLLM build the same architecture."""
    family = FAMILIES[card.family]
    facts = [*COMMON, *(key for key in family.has if key not in ROTARY and key not in LISTS)]
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": card.family,
        "hidden_act": "silu",
        "dtype": "float32",
        **family.writes,
        **{family.keys.get(key, key): getattr(card, key) for key in facts if key not in _replaced(family)},
        "rope_theta": card.rope_theta,
    }
    if card.rope_scaling is not None:
        config["rope_scaling"] = card.rope_scaling.model_dump(exclude_none=True)
    if "partial_rotary_factor" in family.has:
        config["partial_rotary_factor"] = card.partial_rotary_factor
        config["rotary_dim"] = card.rotary_dim
    if family.is_latent:
        del config["head_dim"]  # of the part that turns, to transformers
        config["q_lora_rank"] = card.q_lora_rank or None
    if family.is_hybrid:
        config["moe_latent_size"] = card.moe_latent_size or None
    if family.lists_layers:
        kinds = ["sparse" if i in card.sparse_layers else "dense" for i in range(card.num_hidden_layers)]
        config["mlp_layer_types"] = kinds
    if "shared_index_layers" in family.has:
        shared = card.shared_index_layers
        config["indexer_types"] = ["shared" if i in shared else "full" for i in range(card.num_hidden_layers)]
    if family.dense_first:
        config["first_k_dense_replace"] = len(card.mlp_only_layers)
    elif "mlp_only_layers" in family.has:
        config["mlp_only_layers"] = list(card.mlp_only_layers)
    return config


def _replaced(family: Family) -> tuple[str, ...]:
    """Facts whose name in config.json means another one."""
    return tuple(key for key in family.keys.values() if key in COMMON)


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of each fact of the card that it says anything of. `family` is "other" for those that
    transformers' own code runs.
    """
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind, Family(""))
    facts: dict[str, Any] = {"family": kind if kind in FAMILIES else "other", **family.always, **family.silent}
    for key in (*COMMON, *family.has):
        names = (family.keys.get(key, key), *OTHER_NAMES.get(key, ()))
        found = [config[name] for name in names if config.get(name) is not None]
        if found and key not in _replaced(family) and key not in ROTARY:
            facts[key] = found[0]
    if family.is_latent:
        facts["head_dim"] = facts["qk_nope_head_dim"] + facts["qk_rope_head_dim"]
        if config.get("q_lora_rank", 0) is None:
            facts["q_lora_rank"] = 0
    if family.is_hybrid:
        facts |= _layers(config, facts["hybrid_override_pattern"])
    if "head_dim" not in facts and {"hidden_size", "num_attention_heads"} <= facts.keys():
        facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
    if family.lists_layers and config.get("mlp_layer_types"):
        kinds = config["mlp_layer_types"]
        facts["mlp_only_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    elif family.dense_first and config.get("first_k_dense_replace") is not None:
        facts["mlp_only_layers"] = tuple(range(config["first_k_dense_replace"]))
    elif "mlp_only_layers" in facts:
        facts["mlp_only_layers"] = tuple(facts["mlp_only_layers"])
    if "shared_index_layers" in family.has:
        kinds = _indexer_kinds(config, facts.get("num_hidden_layers", 0))
        facts["shared_index_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == "shared")
    return facts | _rotary_facts(config, facts, family)


def _indexer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Of each layer, "full" or "shared": listed, as a pattern of F and S, or every `index_topk_freq`-th full."""
    if config.get("indexer_types"):
        return list(config["indexer_types"])
    pattern = config.get("index_topk_pattern")
    if pattern:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]


SIZES_OF = {
    "E": ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_latent_size",
          "moe_shared_expert_intermediate_size"),
    "-": ("intermediate_size",),
}  # fmt: skip
LETTERS = {"mamba": "M", "linear_attention": "M", "moe": "E", "attention": "*", "full_attention": "*", "mlp": "-"}


def _layers(config: Mapping[str, Any], silent: str) -> dict[str, Any]:
    """What layers do, and so how many there are, which is what transformers goes by, too; and nothing for the sizes of
    what no layer does, whatever config.json has there.
    """
    kinds = config.get("layers_block_type") or config.get("layer_types")
    pattern = "".join(LETTERS[kind] for kind in kinds) if kinds else config.get("hybrid_override_pattern") or silent
    unused = (*SIZES_OF["E"] * ("E" not in pattern), *SIZES_OF["-"] * ("-" not in pattern))
    return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), **dict.fromkeys(unused, 0)}


def rotary_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What it says of rotary embeddings, as transformers 5 and 4 have it."""
    rotary = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    rotary.setdefault("rope_type", rotary.pop("type", "default"))
    return rotary


def _rotary_facts(config: Mapping[str, Any], facts: Mapping[str, Any], family: Family) -> dict[str, Any]:
    rotary = rotary_of(config)
    found: dict[str, Any] = {}
    theta = rotary.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        found["rope_theta"] = theta
    if "partial_rotary_factor" in family.has:
        part = rotary.get("partial_rotary_factor", config.get("partial_rotary_factor"))
        if part is None and config.get("rotary_dim") and facts.get("head_dim"):
            part = config["rotary_dim"] / facts["head_dim"]
        if part is not None:
            found["partial_rotary_factor"] = part
    if "rope_scaling" in family.has:
        known = {key: value for key, value in rotary.items() if key in RopeScaling.model_fields and value is not None}
        found["rope_scaling"] = None if rotary["rope_type"] == "default" else RopeScaling.model_validate(known)
    return found


def not_built(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a config.json with which its architecture has something that the layers of its family here have not."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return {}
    odd = {key: config[key] for key, known in family.builds.items() if key in config and config[key] not in known}
    kind = rotary_of(config)["rope_type"]
    return odd | ({} if kind in ("default", "linear", "llama3", "yarn") else {"rope_type": kind})
