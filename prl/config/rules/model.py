"""Rules about the model card and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.block_fp8 import BLOCK
from prl.config.config_json import FOREIGN
from prl.config.errors import UserError
from prl.config.families import FAMILIES, OPTIONAL, Family
from prl.config.keys import as_override
from prl.config.rules.checkpoint import names_no_family
from prl.config.rules.rule import Refuse, first_of, next_divisor
from prl.config.schema import ModelCard, RunConfig
from prl.config.world import World


def card_is_complete(config: RunConfig, world: World) -> Iterator[UserError]:
    card = config.model.card
    if card.num_attention_heads % card.num_key_value_heads:
        yield UserError(
            f"{card.num_attention_heads} heads cannot share {card.num_key_value_heads} key/value heads evenly.",
            where=f"model.card.num_key_value_heads={card.num_key_value_heads}",
            why="grouped-query attention gives each key/value head the same number of query heads",
            fix=f"model.card.num_key_value_heads={next_divisor(card.num_key_value_heads, card.num_attention_heads)}",
        )
    family = FAMILIES.get(card.family)
    if family is not None:
        yield from _facts_are_the_familys(config, family)
    if family is not None and family.is_hybrid:
        yield from _pattern_is_complete(card)
    if family is not None and family.has_experts and (not family.is_hybrid or card.layers_of("E")):
        sizes = {"num_experts": 8, "num_experts_per_tok": 1, "moe_intermediate_size": card.hidden_size}
        for key, usual in sizes.items():
            if getattr(card, key) == 0:
                yield UserError(
                    f"A {card.family} card needs {key}.",
                    where=f"model.card.{key}=0",
                    why="the architecture is a mixture of experts",
                    fix=f"model.card.{key}={usual}, or model=tiny_qwen3",
                )
    ours = config.model.impl != "hf" or (world.has_engines and config.inference.engine == "torch")
    if ours and card.mlp_only_layers and card.num_experts and card.dense_layers and not card.sparse_layers:
        yield UserError(
            "No layer of this mixture has experts.",
            where=f"model.card.mlp_only_layers={list(card.mlp_only_layers)}, {card.num_hidden_layers} layers",
            why=f"prl/models builds a {card.family} with at least one layer of experts",
            fix=FOREIGN if config.model.path else "model.card.mlp_only_layers=[]",
        )
    elif card.mlp_only_layers and (card.num_experts == 0 or max(card.mlp_only_layers) >= card.num_hidden_layers):
        yield UserError(
            "The layers without experts are not some of the layers of a mixture of experts.",
            where=f"model.card.mlp_only_layers={list(card.mlp_only_layers)}, {card.num_experts} experts, "
            f"{card.num_hidden_layers} layers",
            why="they are counted from 0",
            fix="model.card.mlp_only_layers=[]",
        )
    if family is not None and card.dense_layers and card.intermediate_size == 0:
        yield UserError(
            f"A {card.family} card with dense layers needs intermediate_size.",
            where=f"model.card.intermediate_size=0, model.card.mlp_only_layers={list(card.mlp_only_layers)}",
            why="a dense layer has one MLP",
            fix=f"model.card.intermediate_size={2 * card.hidden_size}",
        )
    turns = family is None or family.always.get("partial_rotary_factor") != 0
    if card.head_dim % 2 and turns:
        yield UserError(
            f"Heads of {card.head_dim} cannot be rotated.",
            where=f"model.card.head_dim={card.head_dim}",
            why="rotary embeddings turn pairs of a head's dimensions",
            fix=f"model.card.head_dim={card.head_dim + 1}",
        )
    elif turns and (card.rotary_dim % 2 or not card.rotary_dim):
        yield UserError(
            f"{card.rotary_dim} dimensions of a head cannot be rotated.",
            where=f"model.card.head_dim={card.head_dim}, "
            f"model.card.partial_rotary_factor={card.partial_rotary_factor:g}",
            why="rotary embeddings turn pairs of a head's dimensions",
            fix="model.card.partial_rotary_factor=1.0",
        )
    if family is not None and family.is_latent:
        yield from _latents_are_complete(card)
        if ours and card.v_head_dim > card.head_dim:
            yield UserError(
                "Values cannot be wider than queries.",
                where=f"model.card.v_head_dim={card.v_head_dim}, model.card.head_dim={card.head_dim}",
                why="attention kernels take one width, to which values are padded",
                fix=FOREIGN if config.model.path else f"model.card.v_head_dim={card.head_dim}",
            )
    if family is not None and family.is_sparse:
        yield from _indexers_are_complete(card)
    if card.num_experts_per_tok > card.num_experts:
        yield UserError(
            f"A token cannot go to {card.num_experts_per_tok} of {card.num_experts} experts.",
            where=f"model.card.num_experts_per_tok={card.num_experts_per_tok}",
            why="num_experts_per_tok is at most num_experts",
            fix=f"model.card.num_experts_per_tok={card.num_experts}",
        )


def _facts_are_the_familys(config: RunConfig, family: Family) -> Iterator[UserError]:
    """Optional facts of the card that its family has not."""
    card = config.model.card
    for key in OPTIONAL:
        usual = family.always.get(key, ModelCard.model_fields[key].default)
        value = getattr(card, key)
        if key not in family.has and value != usual:
            yield UserError(
                f"A {card.family} has no {key}={as_override(value)}.",
                where=f"model.card.family={card.family}, model.card.{key}={as_override(value)}",
                why=f"of such facts its layers know {', '.join(family.has) or 'none'}",
                fix=f"model.card.{key}={as_override(usual)}",
            )


def _pattern_is_complete(card: ModelCard) -> Iterator[UserError]:
    pattern = card.hybrid_override_pattern
    if len(pattern) != card.num_hidden_layers:
        yield UserError(
            f"The pattern has {len(pattern)} layers, and the card {card.num_hidden_layers}.",
            where=f"model.card.hybrid_override_pattern={as_override(pattern)}, "
            f"model.card.num_hidden_layers={card.num_hidden_layers}",
            why="it has a letter for each layer: M state space, * attention, E experts, - MLP",
            fix=f"model.card.num_hidden_layers={len(pattern)}"
            if pattern
            else "model.card.hybrid_override_pattern=ME*E",
        )
    sizes = ("mamba_num_heads", "mamba_head_dim", "mamba_n_groups", "ssm_state_size", "conv_kernel")
    lacking = [key for key in sizes if getattr(card, key) == 0] if card.state_layers else []
    for key in lacking:
        yield UserError(
            f"A {card.family} card needs {key}.",
            where=f"model.card.{key}=0",
            why="it has state-space layers (M in its pattern)",
            fix=f"model.card.{key}={4 if key == 'conv_kernel' else 8}",
        )
    if card.state_layers and not lacking and card.mamba_num_heads % card.mamba_n_groups:
        yield UserError(
            f"{card.mamba_num_heads} heads of state cannot be cut into {card.mamba_n_groups} groups.",
            where=f"model.card.mamba_num_heads={card.mamba_num_heads}, model.card.mamba_n_groups={card.mamba_n_groups}",
            why="groups are of equally many heads, which share their B and C",
            fix=f"model.card.mamba_n_groups={next_divisor(card.mamba_n_groups, card.mamba_num_heads)}",
        )
    if card.layers_of("E") and card.moe_shared_expert_intermediate_size == 0:
        yield UserError(
            f"A {card.family} card needs moe_shared_expert_intermediate_size.",
            where="model.card.moe_shared_expert_intermediate_size=0",
            why="beside its experts is one that every token sees",
            fix=f"model.card.moe_shared_expert_intermediate_size={2 * card.moe_intermediate_size or card.hidden_size}",
        )


def _latents_are_complete(card: ModelCard) -> Iterator[UserError]:
    for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if getattr(card, key) == 0:
            yield UserError(
                f"A {card.family} card needs {key}.",
                where=f"model.card.{key}=0",
                why="its attention is multi-head latent attention",
                fix=f"model.card.{key}={card.head_dim // 2 * 2 or 2}",
            )
    if card.qk_nope_head_dim + card.qk_rope_head_dim != card.head_dim:
        yield UserError(
            "The two parts of a head are not the head.",
            where=f"model.card.head_dim={card.head_dim}, model.card.qk_nope_head_dim={card.qk_nope_head_dim}, "
            f"model.card.qk_rope_head_dim={card.qk_rope_head_dim}",
            why="a query has a part that is not turned by position, and one that is",
            fix=f"model.card.head_dim={card.qk_nope_head_dim + card.qk_rope_head_dim}",
        )


def _indexers_are_complete(card: ModelCard) -> Iterator[UserError]:
    """Those of sparse attention."""
    least = {"index_topk": 1, "index_n_heads": 1, "index_head_dim": card.qk_rope_head_dim, "q_lora_rank": 1}
    for key, size in least.items():
        if getattr(card, key) < size:
            yield UserError(
                f"A {card.family} card needs {key} of at least {size}.",
                where=f"model.card.{key}={getattr(card, key)}",
                why="an indexer makes queries of the latent of attention's, heads of which are turned in part",
                fix=f"model.card.{key}={max(size, 16)}",
            )
    odd = [layer for layer in card.shared_index_layers if layer == 0 or layer >= card.num_hidden_layers]
    if odd:
        yield UserError(
            f"Layer {odd[0]} cannot share the choice of keys of a layer before it.",
            where=f"model.card.shared_index_layers={as_override(card.shared_index_layers)}",
            why=f"layers count from 0 to {card.num_hidden_layers - 1}, and the first has none before it",
            fix=f"model.card.shared_index_layers={as_override([i for i in card.shared_index_layers if i not in odd])}",
        )


def expert_groups_are_even(config: RunConfig, world: World) -> Iterator[UserError]:
    card = config.model.card
    if card.n_group == 1 or not card.num_experts:
        return
    size = card.num_experts // card.n_group
    if card.num_experts % card.n_group or size < 2:
        yield UserError(
            f"{card.num_experts} experts cannot be cut into {card.n_group} groups.",
            where=f"model.card.n_group={card.n_group}, model.card.num_experts={card.num_experts}",
            why="groups are equal, and each is worth the sum of its two best experts",
            fix="model.card.n_group=1 model.card.topk_group=1",
        )
    elif card.topk_group > card.n_group or card.topk_group * size < card.num_experts_per_tok:
        yield UserError(
            f"A token cannot find {card.num_experts_per_tok} experts in {card.topk_group} of {card.n_group} groups.",
            where=f"model.card.topk_group={card.topk_group}, model.card.n_group={card.n_group}, "
            f"model.card.num_experts_per_tok={card.num_experts_per_tok}",
            why=f"a group has {size} experts",
            fix=f"model.card.topk_group={card.n_group}",
        )


def is_corrected(config: RunConfig) -> bool:
    """Whether checkpoints, and so engines, have the bias of the router's choice."""
    family = FAMILIES.get(config.model.card.family)
    return family is not None and family.corrected


random_model_names_its_tokenizer = Refuse(
    lambda c, w: c.model.path is None and c.model.tokenizer is None,
    "The model has neither a checkpoint nor a tokenizer.",
    where="{model.path=}, {model.tokenizer=}",
    why="without a path there is no directory to take a tokenizer from",
    fix="model.tokenizer=byte",
)


BYTE_TOKENS = 262  # 256 bytes and six special tokens


vocabulary_holds_the_tokens = Refuse(
    lambda c, w: c.model.path is None and c.model.tokenizer == "byte" and c.model.card.vocab_size < BYTE_TOKENS,
    f"A vocabulary of {{model.card.vocab_size}} cannot hold the byte tokenizer's {BYTE_TOKENS} tokens.",
    where="{model.card.vocab_size=}, {model.tokenizer=}",
    why="each token has a row of the embedding",
    fix=f"model.card.vocab_size={BYTE_TOKENS + 2}",
)


def stop_tokens_exist(config: RunConfig, world: World) -> Iterator[UserError]:
    vocab, stops = config.model.card.vocab_size, config.inference.sampling.stop_token_ids
    if any(token >= vocab for token in stops):
        known = [token for token in stops if token < vocab]
        yield UserError(
            f"There is no token {max(stops)} to stop at.",
            where=f"inference.sampling.stop_token_ids=[{','.join(map(str, stops))}], model.card.vocab_size={vocab}",
            why="tokens are counted from 0",
            fix=f"inference.sampling.stop_token_ids=[{','.join(map(str, known))}]",
        )


router_bias_has_a_router = first_of(
    Refuse(
        lambda c, w: c.model.card.num_experts == 0,
        "{model.name} has no experts whose load could be balanced.",
        where="{model.router_bias_update_rate=}",
        why="the model is dense",
        fix="model.router_bias_update_rate=0",
    ),
    Refuse(
        lambda c, w: w.has_engines and not is_corrected(c),
        "The engines would choose other experts than the trainer.",
        where="{model.router_bias_update_rate=}",
        why="the router's bias is no part of Hugging Face checkpoints, so engines sample without it; and where the "
        "trainer replays their choice (inference.return_routed_experts) a bias decides nothing",
        fix="model.router_bias_update_rate=0 (in a job of supervised fine-tuning it may be on)",
    ),
    given=lambda c, w: c.model.router_bias_update_rate > 0,
)

indexers_can_learn = first_of(
    Refuse(
        lambda c, w: c.model.card.index_topk == 0 or c.model.impl == "hf",
        "{model.name} has no indexers that could be trained.",
        where="{model.indexer_loss_coef=}",
        why=lambda c, w: (
            "transformers' code of them passes no gradient" if c.model.card.index_topk else "its attention is dense"
        ),
        fix="model.indexer_loss_coef=0",
    ),
    Refuse(
        lambda c, w: c.memory_recipe.lora.rank > 0,
        "Indexers cannot learn beside adapters.",
        where="{model.indexer_loss_coef=}, {memory_recipe.lora.rank=}",
        why="adapters alone are trained, stored and sent to engines",
        fix="model.indexer_loss_coef=0, or memory=balanced",
    ),
    given=lambda c, w: c.model.indexer_loss_coef > 0,
)

engine_knows_the_model = Refuse(
    # of a config.json without model_type, `transformers_layers_can_be_trained` tells
    lambda c, w: (
        w.has_engines and not c.model.card.is_native and c.inference.engine == "torch" and not names_no_family(c)
    ),
    "The built-in engine cannot run {model.name}.",
    where="{inference.engine=}, {model.card.family=}",
    why="it runs the models of prl/models; other families can be trained, but need another engine to sample",
    fix="inference=vllm",
)


def attention_kernels_fit(config: RunConfig, world: World) -> Iterator[UserError]:
    """Whether the package that holds them is installed is seen when they are activated."""
    model, parallelism = config.model, config.parallelism
    if model.attn.startswith("flash"):
        for broken, where, fix in (
            (model.dtype == "float32", "model.dtype=float32", "model.dtype=bfloat16"),
            (config.deployment.device == "cpu", "deployment.device=cpu", "deployment.device=cuda"),
        ):
            if broken:
                yield UserError(
                    f"{model.attn} cannot run.",
                    where=f"model.attn={model.attn}, {where}",
                    why="flash kernels compute in bfloat16 on GPUs; SDPA would run in their place",
                    fix=f"model.attn=auto, or {fix}",
                )
    elif model.attn == "sdpa" and parallelism.cp > 1 and world.cp_style != "ulysses" and not model.card.index_topk:
        yield UserError(
            f"Context parallelism by {world.cp_style} cannot run SDPA.",
            where=f"model.attn=sdpa, parallelism.cp={parallelism.cp}, parallelism.cp_style={world.cp_style}",
            why="its backward pass starts from the log-sum-exp, which only the flash kernels return",
            fix="model.attn=auto, or parallelism.cp_style=ulysses",
        )


def fp8_fits_the_model(config: RunConfig, world: World) -> Iterator[UserError]:
    """DeepGEMM's kernels; the emulated ones take any size and any dtype."""
    model = config.model
    if model.fp8 != "deep_gemm":
        return
    if model.dtype != "bfloat16":
        yield UserError(
            "Block-scaled FP8 GEMMs take and give bfloat16.",
            where=f"model.fp8=deep_gemm, model.dtype={model.dtype}",
            why="DeepGEMM's kernels know no other activations",
            fix="model.dtype=bfloat16, or model.fp8=emulated",
        )
    card = model.card
    sizes = {
        "hidden_size": card.hidden_size,
        "num_attention_heads * head_dim": card.num_attention_heads * card.head_dim,
        "num_key_value_heads * head_dim": card.num_key_value_heads * card.head_dim,
        "num_attention_heads * v_head_dim": card.num_attention_heads * card.v_head_dim,
        "kv_lora_rank": card.kv_lora_rank,
        "q_lora_rank": card.q_lora_rank,
        "intermediate_size": 0 if card.num_experts else card.intermediate_size,
        "moe_intermediate_size": card.moe_intermediate_size,
        "moe_latent_size": card.moe_latent_size,
        "moe_shared_expert_intermediate_size": card.moe_shared_expert_intermediate_size,
        "mamba_num_heads * mamba_head_dim": card.mamba_num_heads * card.mamba_head_dim,
    }
    uneven = {name: size for name, size in sizes.items() if size % BLOCK}
    if uneven:
        yield UserError(
            f"{config.model.name} cannot be cut into blocks of {BLOCK}.",
            where=", ".join(f"model.card: {name}={size}" for name, size in uneven.items()),
            why=f"DeepGEMM scales weights in blocks of {BLOCK}x{BLOCK}, and pads tokens only",
            fix="model.fp8=none, or model.fp8=emulated for tests",
        )
