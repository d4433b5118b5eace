"""Rules of inference.quantization=fp8_block: weights that travel, and are held by engines, in blocks of FP8."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.block_fp8 import BLOCK, BLOCK_FP8, has_blocks, odd_sizes, sends_blocks
from prl.config.engines import engine_groups
from prl.config.errors import UserError
from prl.config.rules.rule import Refuse, first_of
from prl.config.schema import RunConfig
from prl.config.world import World

WHERE = f"inference.quantization={BLOCK_FP8}"
ENGINES_CAST = "inference.quantization=fp8, by which vLLM quantises what it gets"


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
            fix=f"{ENGINES_CAST}; or a smaller inference.tp, or inference.expert_parallel=true, where that helps",
        )


blocks_can_be_sent = first_of(
    Refuse(
        lambda c, w: c.job != "rl",
        "Nothing brings weights in blocks of FP8.",
        where=WHERE + ", job={job!s}",
        why="a trainer quantises them and sends them so",
        fix="inference.quantization=null, or inference=vllm " + ENGINES_CAST,
    ),
    Refuse(
        lambda c, w: bool(c.inference.urls),
        "Engines that run already say themselves how they hold weights.",
        where=WHERE + ", {inference.urls=}",
        why="weights in another form than they were started with would not fit",
        fix="inference.quantization=null, and start them with --quantization fp8",
    ),
    Refuse(
        lambda c, w: c.weight_transport.type == "lora",
        "Adapters do not travel in blocks of FP8.",
        where=WHERE + ", weight_transport.type=lora",
        why="they are added to what the engine has, which nothing would bring",
        fix="weight_transport=filesystem, which adds adapters to the weights that it sends; or " + ENGINES_CAST,
    ),
    Refuse(
        lambda c, w: not has_blocks(c.model.card) or c.model.impl == "hf",
        "{model.name} cannot travel in blocks of FP8.",
        where=WHERE + ", {model.card.family=}, {model.impl=}",
        why="which matrices engines quantise is known of families with layers here, and of no state spaces",
        fix="inference=vllm " + ENGINES_CAST,
    ),
    Refuse(
        lambda c, w: "hf_overrides" in c.inference.vllm and "quantization_config" in str(c.inference.vllm),
        "How weights are quantised is said twice.",
        where=WHERE + ", inference.vllm.hf_overrides.quantization_config",
        why="the trainer sends blocks of its own choice, which engines are told",
        fix="leave inference.vllm.hf_overrides.quantization_config out",
    ),
    sizes_are_whole_blocks,
    given=lambda c, w: sends_blocks(c),
)
