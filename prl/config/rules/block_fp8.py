"""Rules of inference.quantization=fp8_block: weights that travel, and are held by engines, in blocks of FP8."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from prl.config.block_fp8 import BLOCK, BLOCK_FP8, engine_dtype, has_blocks, odd_sizes, sends_blocks, to_sixteen_bits
from prl.config.engines import engine_groups
from prl.config.errors import UserError
from prl.config.rules.rule import Refuse, first_of
from prl.config.schema import RunConfig
from prl.config.world import World

WHERE = f"inference.quantization={BLOCK_FP8}"


def engines_cast(config: RunConfig) -> str:
    return f"inference.quantization=fp8{to_sixteen_bits(config)}, by which vLLM quantises what it gets"


def sizes_are_whole_blocks(config: RunConfig, world: World) -> Iterator[UserError]:
    """For vLLM; the built-in engine takes any."""
    inference = config.inference
    if inference.engine != "vllm":
        return
    tp = max(group.tp for group in engine_groups(config, world))
    odd = odd_sizes(config.model.card, tp, 1 if inference.expert_parallel else tp)
    if odd:
        told = ", ".join(f"{what}: {size}" for what, size in odd.items())
        yield UserError(
            f"vLLM cannot cut {config.model.name} into blocks of {BLOCK}.",
            where=f"{WHERE}, engines with tp={tp}, {told}",
            why="it joins matrices, and splits them over devices, where blocks end",
            fix=engines_cast(config)
            + "; or a smaller inference.tp, or inference.expert_parallel=true, where that helps",
        )


def formats_have_names(config: RunConfig, world: World) -> Iterator[UserError]:
    """vLLM has many, of which some are close to ours; its own complaint comes when its engine starts."""
    given = config.inference.quantization
    if given is None or given == BLOCK_FP8:
        return
    alike = get_close_matches(given.strip().lower().replace("-", "_"), [BLOCK_FP8], cutoff=0.9)
    if alike or not given.strip():
        yield UserError(
            f"There is no format {given!r} of weights.",
            where=f"inference.quantization={given!r}",
            why=f"did you mean {BLOCK_FP8}?" if alike else "it is empty",
            fix=f"inference.quantization={BLOCK_FP8}, or null",
        )


eight_bits_want_sixteen = Refuse(
    lambda c, w: (
        c.inference.engine == "vllm"
        and not c.inference.urls
        and c.inference.quantization in ("fp8", BLOCK_FP8)
        and engine_dtype(c) == "float32"
    ),
    "vLLM does not multiply FP8 into float32.",
    where="{inference.quantization=}, {inference.dtype=}, {model.dtype=}",
    why="its kernels give bfloat16 or float16",
    fix="inference.dtype=bfloat16, or model.dtype=bfloat16",
)

blocks_can_be_sent = first_of(
    Refuse(
        lambda c, w: c.job != "rl",
        "Nothing brings weights in blocks of FP8.",
        where=WHERE + ", job={job!s}",
        why="a trainer quantises them and sends them so",
        fix=lambda c, w: "inference.quantization=null, or inference=vllm " + engines_cast(c),
    ),
    Refuse(
        lambda c, w: bool(c.inference.urls),
        "Engines that run already say themselves how they hold weights.",
        where=WHERE + ", {inference.urls=}",
        why="the run did not start them, and does not know in which form they take weights",
        fix="inference.quantization=null: the built-in engine takes what comes, vLLM has its own --quantization fp8",
    ),
    Refuse(
        lambda c, w: c.weight_transport.type == "lora",
        "Adapters do not travel in blocks of FP8.",
        where=WHERE + ", weight_transport.type=lora",
        why="they are added to what the engine has, which nothing would bring",
        fix=lambda c, w: (
            "weight_transport=filesystem, which adds adapters to the weights that it sends; or " + engines_cast(c)
        ),
    ),
    Refuse(
        lambda c, w: has_blocks(c.model.card) and c.model.impl == "hf",
        "Models of transformers do not travel in blocks of FP8.",
        where=WHERE + ", {model.impl=}",
        why="which of their matrices engines quantise is not known",
        fix=lambda c, w: "model.impl=auto; or inference=vllm " + engines_cast(c),
    ),
    Refuse(
        lambda c, w: not has_blocks(c.model.card),
        "{model.name} cannot travel in blocks of FP8.",
        where=WHERE + ", {model.card.family=}, {model.impl=}",
        why="which matrices engines quantise is known of families with layers here, and of no state spaces",
        fix=lambda c, w: "inference=vllm " + engines_cast(c),
    ),
    Refuse(
        lambda c, w: "hf_overrides" in c.inference.vllm and "quantization_config" in str(c.inference.vllm),
        "How weights are quantised is said twice.",
        where=WHERE + ", inference.vllm.hf_overrides.quantization_config",
        why="the trainer sends blocks of its own choice, which engines are told",
        fix="leave inference.vllm.hf_overrides.quantization_config out",
    ),
    Refuse(
        lambda c, w: "load_format" in c.inference.vllm,
        "vLLM cannot load a checkpoint as blocks of FP8.",
        where=WHERE + ", inference.vllm.load_format",
        why="it is in another form; engines begin with made-up weights, and the first version comes at once",
        fix="leave inference.vllm.load_format out",
    ),
    sizes_are_whole_blocks,
    given=lambda c, w: sends_blocks(c),
)
