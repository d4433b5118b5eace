"""Model cards from the config.json of Hugging Face checkpoints, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from prl.config.errors import UserError
from prl.config.families import FAMILIES, Family
from prl.config.schema_model import OLD_CONTEXT, STRETCHED, ModelCard, RopeScaling

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
# the same of families that are transformers' alone: its configurations' `attribute_map`
FOREIGN_NAMES = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "num_key_value_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "max_position_embeddings": ("n_positions", "max_seq_len", "model_max_length"),
}
EXPERTS = (*OTHER_NAMES["num_experts"], "num_experts")  # what checkpoints call their number, of any family
CHOSEN = ("num_experts_per_tok", "num_experts_per_token")  # and how many of them a token goes to
NEVER_NULL = ("norm_topk_prob", "routed_scaling_factor", "tie_word_embeddings", "rms_norm_eps")  # null is no silence
# layers that predict further tokens, by their number, as DeepSeek, GLM and Nemotron call it; Qwen; MiniMax
FURTHER = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
# how many or how wide, of families that transformers' own code runs, too; null is silence
NOT_BELOW_0 = (
    *FURTHER,
    *("ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "word_embed_proj_dim"),
)
SIZES_ABOVE_0 = ("sliding_window", "attention_chunk_size", "chunk_size")  # in tokens, where a model has such a thing
COUNTS = ("rotary_dim", "first_k_dense_replace", "index_topk_freq", "index_skip_topk_offset")  # read besides


BUILT_ROPES = ("default", "linear", "llama3", "yarn")
SAME_LAYERS = {"kimi_k2": "deepseek_v3"}  # model_type of checkpoints -> the family that has their layers
LARGER = ("kimi_k25",)  # model_type of those whose text model, `text_config`, is read and trained by itself


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the text model, under the family that has its layers."""
    part = config["text_config"] if is_part_of_a_larger_model(config) else config
    kind = str(part.get("model_type"))
    return {**part, "model_type": SAME_LAYERS[kind]} if kind in SAME_LAYERS else part


def is_part_of_a_larger_model(config: Mapping[str, Any]) -> bool:
    """Whether the text model of a checkpoint has its tensors under other names than by itself."""
    return config.get("model_type") in LARGER


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
        **family.router_facts(card.router_dtype),
        **{family.keys.get(key, key): getattr(card, key) for key in facts if key not in _replaced(family)},
        "rope_theta": card.rope_theta,
    }
    if card.pinned_scaling is not None:
        config["rope_scaling"] = card.pinned_scaling.model_dump(exclude_none=True)
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
        config |= shared_choices(card)
    if family.dense_first:
        config["first_k_dense_replace"] = len(card.mlp_only_layers)
    elif "mlp_only_layers" in family.has:
        config["mlp_only_layers"] = list(card.mlp_only_layers)
    return config


def shared_choices(card: ModelCard) -> dict[str, str]:
    """Which layers have no indexer, as vLLM reads it: one letter a layer, S for those. It passes over transformers'
    `indexer_types`. Empty where each has its own, as vLLM takes it without a word.
    """
    shared = card.shared_index_layers
    letters = "".join("S" if i in shared else "F" for i in range(card.num_hidden_layers))
    return {"index_topk_pattern": letters} if shared else {}


def restated(config: Mapping[str, Any], card: ModelCard, dtype: str) -> dict[str, Any]:
    """The config.json of a checkpoint whose weights were trained by transformers' code, which goes by that file: they
    are written in `dtype`, and positions are as many as the card says where they turn by what does not depend on their
    number.
    """
    said = _of_dtype(config, dtype)
    if isinstance(inner := said.get("text_config"), Mapping):
        said["text_config"] = _of_dtype(inner, dtype)
    stated = card.max_position_embeddings
    if not card.is_native or said.get("max_position_embeddings") in (None, stated):
        return said
    rotary = rotary_of(said)
    if rotary["rope_type"] not in BUILT_ROPES:
        return said
    for section in ("rope_parameters", "rope_scaling"):
        if said.get(section) and OLD_CONTEXT in rotary:  # silence would say another from now on
            said[section] = {**said[section], OLD_CONTEXT: rotary[OLD_CONTEXT]}
    return {**said, "max_position_embeddings": stated}


def _of_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    rest = {key: value for key, value in config.items() if key != "torch_dtype"}
    return rest | ({"dtype": dtype} if "dtype" in config or "torch_dtype" in config else {})


def _replaced(family: Family) -> tuple[str, ...]:
    """Facts whose name in config.json means another one."""
    return tuple(key for key in family.keys.values() if key in COMMON)


def facts_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of each fact of the card that it says anything of. `family` is "other" for those that
    transformers' own code runs. Raises ValueError for what cannot be.
    """
    config = text_config(config)
    kind = str(config.get("model_type"))
    family = FAMILIES.get(kind, Family(""))
    _refuse_other_types(config, family)
    _refuse_impossible(config, family)
    facts: dict[str, Any] = {"family": kind if kind in FAMILIES else "other", **family.always, **family.silent}
    for key in (*COMMON, *family.has):
        own, *others = _names(key, family)
        if key == "num_key_value_heads" and key in family.silent and own not in config:
            others = []  # of these families silence means that number, and null as many as there are of queries
        found = [config[name] for name in (own, *others) if config.get(name) is not None]
        if found and key not in _replaced(family) and key not in ROTARY:
            facts[key] = found[0]
    if family.is_latent:
        facts["head_dim"] = facts["qk_nope_head_dim"] + facts["qk_rope_head_dim"]
        if config.get("q_lora_rank", 0) is None:
            facts["q_lora_rank"] = 0
    if family.is_hybrid:
        facts |= _layers(config, facts["hybrid_override_pattern"])
    if "head_dim" not in facts and facts.get("hidden_size") and facts.get("num_attention_heads"):
        facts["head_dim"] = facts["hidden_size"] // facts["num_attention_heads"]
    if family.lists_layers and config.get("mlp_layer_types"):
        kinds = _listed(config, "mlp_layer_types", ("dense", "sparse"), facts.get("num_hidden_layers", 0))
        facts["mlp_only_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == "dense")
    elif family.dense_first and config.get("first_k_dense_replace") is not None:
        first = config["first_k_dense_replace"]
        facts["mlp_only_layers"] = tuple(range(min(first, facts.get("num_hidden_layers", first))))
    elif "mlp_only_layers" in facts:
        facts["mlp_only_layers"] = tuple(facts["mlp_only_layers"])
    if "shared_index_layers" in family.has:
        kinds = _indexer_kinds(config, facts.get("num_hidden_layers", 0))
        facts["shared_index_layers"] = tuple(i for i, kind in enumerate(kinds) if kind == "shared")
    facts |= _rotary_facts(config, facts, family)
    _checked(ModelCard, facts)
    return facts


def _checked(kind: type[BaseModel], facts: Mapping[str, Any]) -> BaseModel | None:
    """None: there are too few of them. Raises ValueError for those that no model can have."""
    try:
        return kind.model_validate(facts)
    except ValidationError as error:
        wrong = [item for item in error.errors() if item["type"] != "missing"]
        if wrong:
            told = [
                f"{'.'.join(map(str, item['loc'])) or 'rope_scaling'}: {item['msg']}, not {item['input']}"
                for item in wrong
            ]
            raise ValueError("; ".join(told)) from error
        return None


def _names(key: str, family: Family) -> tuple[str, ...]:
    """Under which a config.json may have a fact of the card, the family's own first."""
    foreign = () if family.architecture else FOREIGN_NAMES.get(key, ())
    return (family.keys.get(key, key), *OTHER_NAMES.get(key, ()), *foreign)


def _refuse_other_types(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for "32" and 32.0 where 32 belongs, and "false" where false does: Python would take the last for
    true, and transformers takes none of them.
    """
    facts = [name for key in (*COMMON, *family.has, *ROTARY) for name in _names(key, family)]
    built = [key for key, known in family.builds.items() if not any(isinstance(value, str) for value in known)]
    names = dict.fromkeys((*facts, *built, *COUNTS))
    places = {name: config[name] for name in names if name in config and name != "hybrid_override_pattern"}
    for section in ("rope_scaling", "rope_parameters"):
        if isinstance(config.get(section), Mapping):
            known = (*RopeScaling.model_fields, *ROTARY)
            places |= {f"{section}.{key}": value for key, value in config[section].items() if key in known}
    texts = {name: value for name, value in places.items() if not name.endswith(".rope_type") and _has_text(value)}
    if texts:
        told = ", ".join(f'"{name}": {json.dumps(value)}' for name, value in texts.items())
        raise ValueError(f"text stands where numbers, true or false belong, which have no quotes: {told}")
    whole = [name for key in COMMON if ModelCard.model_fields[key].annotation is int for name in _names(key, family)]
    if parts := [f'"{name}": {config[name]}' for name in whole if isinstance(config.get(name), float)]:
        raise ValueError(f"a whole number has a decimal point, which transformers does not take: {', '.join(parts)}")


def _refuse_impossible(config: Mapping[str, Any], family: Family) -> None:
    """Raise ValueError for sizes with which no model can run, and which building it may pass over."""
    experts, chosen = ([(key, config[key]) for key in keys if config.get(key)] for keys in (EXPERTS, CHOSEN))
    for (name, there), (key, wanted) in zip(experts[:1], chosen[:1], strict=False):
        if isinstance(there, int) and isinstance(wanted, int) and wanted > there:
            raise ValueError(f"{key} is {wanted}, and there are {there} experts ({name})")
    for key in SIZES_ABOVE_0:
        is_off = key == "sliding_window" and config.get("use_sliding_window") is False
        if not is_off and isinstance(size := config.get(key), int) and not isinstance(size, bool) and size < 1:
            raise ValueError(f"{key} is {size}, and it is a number of tokens")
    for key in NOT_BELOW_0:
        if (size := config.get(key)) is not None and (type(size) is not int or size < 0):
            raise ValueError(f"{key} is {json.dumps(size)}, where a whole number from 0 on belongs")
    if nothing := [key for key in NEVER_NULL if family.architecture and key in config and config[key] is None]:
        raise ValueError(f"null stands where a value belongs: {', '.join(nothing)}")
    layers = next((config[name] for name in _names("num_hidden_layers", Family("")) if config.get(name)), None)
    kinds = None if family.is_hybrid else config.get("layer_types")  # there it says how many there are
    if isinstance(kinds, list | tuple) and isinstance(layers, int) and len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries for {layers} layers")


def _has_text(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and any(isinstance(one, str) for one in value))


def _indexer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """Of each layer, "full" or "shared": listed, as a pattern of F and S, or every `index_topk_freq`-th full."""
    if config.get("indexer_types"):
        return _listed(config, "indexer_types", ("full", "shared"), layers)
    pattern = config.get("index_topk_pattern")
    if pattern:
        return [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    every, offset = max(config.get("index_topk_freq") or 1, 1), config.get("index_skip_topk_offset", 2)
    return ["full" if max(i - offset + 1, 0) % every == 0 else "shared" for i in range(layers)]


def _listed(config: Mapping[str, Any], key: str, kinds: Sequence[str], layers: int) -> list[str]:
    """One of `kinds` for each layer; `layers` 0: however many. Raises ValueError for another list."""
    found = list(config[key])
    if odd := [kind for kind in found if kind not in kinds]:
        raise ValueError(f"{key} has {odd[0]!r}, and layers are {', '.join(kinds)}")
    if layers and len(found) != layers:
        raise ValueError(f"{key} has {len(found)} entries for {layers} layers")
    return found


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
    key = next((key for key in ("layers_block_type", "layer_types") if config.get(key)), None)
    pattern = (
        "".join(LETTERS[kind] for kind in _listed(config, key, list(LETTERS), 0))
        if key
        else config.get("hybrid_override_pattern") or silent
    )
    unused = (*SIZES_OF["E"] * ("E" not in pattern), *SIZES_OF["-"] * ("-" not in pattern))
    return {"hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern), **dict.fromkeys(unused, 0)}


def rotary_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What it says of rotary embeddings: `rope_parameters` in files of transformers 5, `rope_scaling` in those of 4.
    Of a stretched context the old one is there, as transformers has it: config.json's own where it says no other.

    Raises UserError where both stand there and differ: transformers goes by the second alone, and forgets the first's
    `rope_theta`, which nobody can have meant.
    """
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key) and not isinstance(config[key], Mapping):
            raise ValueError(f"{key} is a {type(config[key]).__name__}, where an object belongs")
    sections = [dict(config.get(key) or {}) for key in ("rope_scaling", "rope_parameters")]
    for section in sections:
        section.setdefault("rope_type", section.pop("type", "default"))
        if config.get("rope_theta") is not None:
            section.setdefault("rope_theta", config["rope_theta"])
    given = [key for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    if len(given) == 2 and sections[0] != sections[1]:
        keys = sorted(key for key in {*sections[0], *sections[1]} if sections[0].get(key) != sections[1].get(key))
        raise UserError(
            f"config.json says two things of rotary embeddings: {', '.join(keys)}.",
            where="rope_scaling, rope_parameters",
            why="engines and transformers go by rope_scaling alone where both are there",
            fix="all of it under rope_parameters, with rope_theta, and no rope_scaling in config.json",
        )
    section = sections[1] if given == ["rope_parameters"] else sections[0]
    if section["rope_type"] in STRETCHED:
        said = (config.get(OLD_CONTEXT), section.get(OLD_CONTEXT), config.get("max_position_embeddings"))
        found = [old for old in said if old is not None]
        section |= {OLD_CONTEXT: found[0]} if found else {}
    return section


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
        kind = rotary["rope_type"]
        is_scaled = kind in BUILT_ROPES and kind != "default"  # others are for transformers' own layers: `not_built`
        if is_scaled and "factor" not in known:
            raise ValueError(f"rotary embeddings are scaled ({kind}) by a factor that it does not say")
        if is_scaled and kind in STRETCHED and OLD_CONTEXT not in known:
            raise ValueError(f"rotary embeddings are stretched ({kind}) from a context that it does not say")
        found["rope_scaling"] = _checked(RopeScaling, known) if is_scaled else None
    return found


def not_built(config: Mapping[str, Any]) -> dict[str, Any]:
    """Keys of a config.json with which its architecture has something that the layers of its family here have not."""
    config = text_config(config)
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return {}
    said = {**family.assumed, **config}
    odd = {key: said[key] for key, known in family.builds.items() if key in said and said[key] not in known}
    if not (family.is_hybrid or family.is_sparse) and (
        kinds := {*(config.get("layer_types") or ())} - {"full_attention"}
    ):
        odd["layer_types"] = sorted(kinds)
    kind = rotary_of(config)["rope_type"]
    return odd | ({} if kind in BUILT_ROPES else {"rope_type": kind})
