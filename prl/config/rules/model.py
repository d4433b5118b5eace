"""Rules about the model card and its checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.rules.rule import next_divisor
from prl.config.schema import RunConfig
from prl.config.world import has_engines


def card_is_complete(config: RunConfig) -> Iterator[UserError]:
    card = config.model.card
    if card.num_attention_heads % card.num_key_value_heads:
        yield UserError(
            f"{card.num_attention_heads} heads cannot share {card.num_key_value_heads} key/value heads evenly.",
            where=f"model.card.num_key_value_heads={card.num_key_value_heads}",
            why="grouped-query attention gives each key/value head the same number of query heads",
            fix=f"model.card.num_key_value_heads={next_divisor(card.num_key_value_heads, card.num_attention_heads)}",
        )
    if card.family == "qwen3_moe":
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(card, key) == 0:
                yield UserError(
                    f"A qwen3_moe card needs {key}.",
                    where=f"model.card.{key}=0",
                    why="the architecture is a mixture of experts",
                    fix=f"model.card.{key}=N, or model.card.family=qwen3",
                )
    if card.family == "qwen3" and card.intermediate_size == 0:
        yield UserError(
            "A qwen3 card needs intermediate_size.",
            where="model.card.intermediate_size=0",
            why="a dense model has one MLP in each layer",
            fix=f"model.card.intermediate_size={2 * card.hidden_size}",
        )
    if card.num_experts_per_tok > card.num_experts:
        yield UserError(
            f"A token cannot go to {card.num_experts_per_tok} of {card.num_experts} experts.",
            where=f"model.card.num_experts_per_tok={card.num_experts_per_tok}",
            why="num_experts_per_tok is at most num_experts",
            fix=f"model.card.num_experts_per_tok={card.num_experts}",
        )


def random_model_names_its_tokenizer(config: RunConfig) -> Iterator[UserError]:
    if config.model.path is None and config.model.tokenizer is None:
        yield UserError(
            "The model has neither a checkpoint nor a tokenizer.",
            where="model.path=null, model.tokenizer=null",
            why="without a path there is no directory to take a tokenizer from",
            fix="model.tokenizer=byte",
        )


def router_bias_has_a_router(config: RunConfig) -> Iterator[UserError]:
    rate, card = config.model.router_bias_update_rate, config.model.card
    if rate == 0:
        return
    where = f"model.router_bias_update_rate={rate}"
    if card.num_experts == 0:
        yield UserError(
            f"{config.model.name} has no experts whose load could be balanced.",
            where=where,
            why="the model is dense",
            fix="model.router_bias_update_rate=0",
        )
    elif has_engines(config):
        yield UserError(
            "The engines would choose other experts than the trainer.",
            where=where,
            why="the router's bias is no part of Hugging Face checkpoints, so engines sample without it; and where the "
            "trainer replays their choice (inference.return_routed_experts) a bias decides nothing",
            fix="model.router_bias_update_rate=0 (in a job of supervised fine-tuning it may be on)",
        )


def engine_knows_the_model(config: RunConfig) -> Iterator[UserError]:
    if has_engines(config) and config.model.card.family == "other" and config.inference.engine == "torch":
        yield UserError(
            f"The built-in engine cannot run {config.model.name}.",
            where="inference.engine=torch, model.card.family=other",
            why="it runs the models of prl/models; other families can be trained, but need another engine to sample",
            fix="inference=vllm",
        )


def attention_kernels_fit(config: RunConfig) -> Iterator[UserError]:
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
    elif model.attn == "sdpa" and parallelism.cp > 1 and parallelism.cp_style == "ring":
        yield UserError(
            "A ring cannot run SDPA.",
            where=f"model.attn=sdpa, parallelism.cp={parallelism.cp}, parallelism.cp_style=ring",
            why="parts of the keys are put together by their log-sum-exp, which only the flash kernels return",
            fix="model.attn=auto, or parallelism.cp_style=ulysses",
        )


FP8_BLOCK = 128


def fp8_fits_the_model(config: RunConfig) -> Iterator[UserError]:
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
        "intermediate_size": 0 if card.num_experts else card.intermediate_size,
        "moe_intermediate_size": card.moe_intermediate_size,
    }
    uneven = {name: size for name, size in sizes.items() if size % FP8_BLOCK}
    if uneven:
        yield UserError(
            f"{config.model.name} cannot be cut into blocks of {FP8_BLOCK}.",
            where=", ".join(f"model.card: {name}={size}" for name, size in uneven.items()),
            why=f"DeepGEMM scales weights in blocks of {FP8_BLOCK}x{FP8_BLOCK}, and pads tokens only",
            fix="model.fp8=none, or model.fp8=emulated for tests",
        )
