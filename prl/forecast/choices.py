"""`python -m prl.plan --recipes`: memory recipes of one point, from the fastest to the smallest, and which of them fit.

What a model recomputes, offloads or cuts into chunks is a trade of seconds for bytes that nobody should have to guess:
the trainer's step and its peak are forecast for every sensible combination of `memory_recipe`'s keys, and those are
shown than which no other is both as fast and about as small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from prl.config.rules import violations
from prl.config.schema import MemoryConfig, RunConfig
from prl.config.world import world_of
from prl.forecast.forecast import timing_of
from prl.forecast.hardware import Hardware
from prl.forecast.host_memory import host_memory, limit_of
from prl.forecast.memory import GIB, peak_memory
from prl.forecast.setting import Setting
from prl.forecast.workload import Workload, workload_of
from prl.planning import make_plan

CHEAP = ("norm", "act")  # targets that repeat no product of matrices
CHUNKS: tuple[int | Literal["auto"], ...] = ("auto", 2048, 1024)
LESS = 0.97  # of a peak, at least, for a slower recipe to be worth a line
ROOM = 0.04  # of a GPU, that the forecast of a peak may be wrong by and PyTorch's caching may lose


@dataclass(frozen=True)
class Choice:
    """One choice for `memory_recipe`."""

    words: tuple[str, ...]  # that say it on a command line
    seconds: float  # of the trainer's step
    tokens_per_s: float  # trained, per GPU
    peak_gib: float  # of a rank
    host_gib: float  # of a node's trainers
    fits: bool


def choices(hardware: Hardware, config: RunConfig, mean: int | None = None, prompt: int | None = None) -> list[Choice]:
    """The fastest first, each next one smaller. mean, prompt: tokens of completions and prompts, as `workload_of`
    takes them. Raises UserError for a job without a trainer.
    """
    work = workload_of(config, mean, prompt)
    found = [measure(hardware, one, words, work) for one, words in candidates(config)]
    found.sort(key=lambda recipe: (recipe.seconds, recipe.peak_gib))
    best: list[Choice] = []
    for recipe in found:
        if not best or recipe.peak_gib < best[-1].peak_gib * LESS:
            best.append(recipe)
    return best


def candidates(config: RunConfig) -> Iterator[tuple[RunConfig, tuple[str, ...]]]:
    """Configurations that no rule refuses, with the words that say their recipe. LoRA and shared prefixes stay."""
    card, recipe = config.model.card, config.memory_recipe
    cheap = tuple(target for target in card.ac_targets if target in CHEAP)
    without_blocks = tuple(target for target in card.ac_targets if target not in ("mlp", "moe", "scan"))
    targets = dict.fromkeys(t for t in (cheap, without_blocks, card.ac_targets) if t)
    recomputed = [("none", ()), *(("selective", t) for t in targets), ("full", ())]
    compiles = (True,) if config.model.impl != "hf" else (False,)
    chunks = CHUNKS if config.model.impl != "hf" or not recipe.lora.rank else ("disabled",)
    for (mode, kinds), chunk, offload, host, compiled in product(
        recomputed, chunks, (False, True), (False, True, "full"), compiles
    ):
        changes: dict[str, Any] = {
            "ac": recipe.ac.model_copy(update={"mode": mode, "targets": kinds, "freq": 1}),
            "ac_offloading": recipe.ac_offloading.model_copy(update={"enabled": offload}),
            "fused_lm_head_token_chunk_size": chunk,
            "optim_cpu_offload": host,
            "fsdp_cpu_offload": False,
            "compile": compiled,
        }
        made = recipe.model_copy(update=changes)
        one = config.model_copy(update={"memory_recipe": made})
        if not violations(one):
            yield one, words_of(made)


def words_of(recipe: MemoryConfig) -> tuple[str, ...]:
    """On the command line, after memory=none (or memory=lora, whose adapters stay)."""
    said = [f"fused_lm_head_token_chunk_size={recipe.fused_lm_head_token_chunk_size}"]
    if recipe.compile:
        said.append("compile=true")
    if recipe.ac.mode != "none":
        said.append(f"ac.mode={recipe.ac.mode}")
    if recipe.ac.targets:
        said.append(f"ac.targets=[{','.join(recipe.ac.targets)}]")
    if recipe.ac_offloading.enabled:
        said.append("ac_offloading.enabled=true")
    if recipe.optim_cpu_offload:
        said.append(f"optim_cpu_offload={str(recipe.optim_cpu_offload).lower()}")
    return tuple(f"memory_recipe.{word}" for word in said)


def measure(hardware: Hardware, config: RunConfig, words: tuple[str, ...], work: Workload) -> Choice:
    plan, heaviest = make_plan(config), Setting(hardware, config, max(work.laps, key=sum))
    seconds = timing_of(hardware, plan, work).trainer_s
    peak, host, limit = peak_memory(heaviest, len(work.laps)), sum(host_memory(heaviest).values()), limit_of(config)
    world = world_of(config)
    room = hardware.memory_gib * (1 - (world.overlapping_part or 0.0)) * (1 - ROOM)
    return Choice(
        words,
        seconds,
        work.tokens / seconds / world.mesh.size,
        peak.total / GIB,
        host / GIB,
        peak.total / GIB <= room and (limit is None or host <= limit),
    )


def render(found: list[Choice], config: RunConfig, hardware: Hardware) -> str:
    """The table, and the command's words of the fastest that fits."""
    base = "memory=lora" if config.memory_recipe.lora.rank else "memory=none"
    head = f"a rank on a GPU of {hardware.memory_gib:.5g} GiB, by the rates of {hardware.name} (prl/forecast/README.md)"
    rows = [
        f"{'fits' if one.fits else 'too large':9}  {one.seconds:8.3f}  {one.tokens_per_s:10,.0f}  {one.peak_gib:8.1f}"
        f"  {one.host_gib:8.1f}  {' '.join(word.removeprefix('memory_recipe.') for word in one.words)}"
        for one in found
    ]
    columns = f"{'':9}  {'step, s':>8}  {'tokens/s':>10}  {'GiB peak':>8}  {'GiB host':>8}  memory_recipe, after {base}"
    chosen = next((one for one in found if one.fits), None)
    said = " ".join(f"'{word}'" if "[" in word else word for word in (chosen.words if chosen else ()))
    last = (
        f"the fastest that fits:  {base} {said}"
        if chosen
        else "none of them fits: more ranks (parallelism.dp_shard), shorter rows (seq_len), memory=lora"
    )
    return "\n".join([head, columns, *rows, "", last])
