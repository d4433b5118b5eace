"""Rules of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.families import FAMILIES
from prl.config.rules.rule import Refuse
from prl.config.schema import MemoryConfig, RunConfig
from prl.config.schema_jobs import WHOLE_RUNS
from prl.config.world import World

ALTERNATIVES = {"transformers": "Plain transformers", "trl": "TRL"}

there_is_a_benchmark = Refuse(
    lambda c, w: c.job == "bench" and c.bench is None,
    "There is nothing to measure.",
    where="{job=}, {bench=}",
    why="job is what the command says: python -m prl.bench",
    fix="job=rl",
)


def documents_fit_the_row(config: RunConfig, world: World) -> Iterator[UserError]:
    assert config.bench is not None
    doc_len = config.bench.doc_len
    needed = doc_len if isinstance(doc_len, int) else sum(doc_len)
    if needed > config.seq_len:
        yield UserError(
            f"{needed} tokens of documents do not fit a row of {config.seq_len}.",
            where=f"bench.doc_len={doc_len}, seq_len={config.seq_len}",
            why="a row holds whole documents: one of doc_len tokens, or all of a list",
            fix=f"seq_len={needed}",
        )


def variable_lengths_have_one_maximum(config: RunConfig, world: World) -> Iterator[UserError]:
    assert config.bench is not None
    if config.bench.lengths == "variable" and not isinstance(config.bench.doc_len, int):
        yield UserError(
            "Lengths are either listed or drawn.",
            where=f"bench.lengths=variable, bench.doc_len={list(config.bench.doc_len)}",
            why="variable lengths are drawn between doc_len / 8 and doc_len",
            fix=f"bench.doc_len={max(config.bench.doc_len)}, or bench.lengths=fixed",
        )


def documents_are_longer_than_their_prompt(config: RunConfig, world: World) -> Iterator[UserError]:
    bench = config.bench
    assert bench is not None
    shortest = bench.shortest
    if shortest == 1:
        yield UserError(
            "Of a document of one token nothing is trained.",
            where=f"bench.doc_len={bench.doc_len}, bench.lengths={bench.lengths}",
            why="a document's first token follows from none",
            fix="bench.doc_len=1024",
        )
    elif bench.prompt_len >= shortest:
        yield UserError(
            f"Of a document of {shortest} tokens nothing is left to train behind a prompt of {bench.prompt_len}.",
            where=f"bench.prompt_len={bench.prompt_len}, bench.doc_len={bench.doc_len}, bench.lengths={bench.lengths}",
            why="doc_len counts the prompt; variable lengths begin at doc_len / 8",
            fix=f"bench.prompt_len={shortest - 1}",
        )


alternatives_have_one_device = Refuse(
    lambda c, w: c.bench and c.bench.target in ALTERNATIVES and w.ranks > 1,
    "{bench.target} does not train on {world.ranks} devices here.",
    where="{bench.target=}, {world.ranks} trainer ranks",
    why="the comparison is training in one process",
    fix="parallelism=single",
)


def alternatives_stay_plain(config: RunConfig, world: World) -> Iterator[UserError]:
    """What they would pass over in silence."""
    assert config.bench is not None
    target = config.bench.target
    if target not in ALTERNATIVES:
        return
    usual = MemoryConfig()
    levers = [key for key in MemoryConfig.model_fields if getattr(config.memory_recipe, key) != getattr(usual, key)]
    others = f"a model of family {' or '.join(FAMILIES)}"
    from_random = target == "transformers"
    for passed_over, where, fix in (
        (bool(levers), ", ".join(f"memory_recipe.{key}" for key in levers), "memory=none"),
        (config.model.fp8 != "none", f"model.fp8={config.model.fp8}", "model.fp8=none"),
        (config.model.attn not in ("auto", "sdpa"), f"model.attn={config.model.attn}", "model.attn=auto"),
        (config.optim.type != "adamw", f"optim.type={config.optim.type}", "optim=adamw"),
        (from_random and not config.bench.random_weights, "bench.random_weights=false", "bench.random_weights=true"),
        (from_random and not config.model.card.is_native, "model.card.family=other", others),
    ):
        if passed_over:
            yield UserError(
                f"{ALTERNATIVES[target]} is measured plain.",
                where=f"bench.target={target}, {where}",
                why="the comparison is AdamW over all weights, SDPA and whole logits, without levers of ours; "
                "bench.target=transformers has its own gradient checkpointing (bench.baseline_checkpointing)",
                fix=fix,
            )


warm_starts_are_of_whole_runs = Refuse(
    lambda c, w: c.bench and c.warm_start is not None and c.bench.target not in WHOLE_RUNS,
    "bench.target={bench.target} trains nothing that begins with a warm start.",
    where="{bench.target=}, warm_start={choices[warm_start]}",
    why="it measures made-up data",
    fix="warm_start=none, or bench.target=stack",
)
