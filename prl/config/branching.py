"""A run that goes on from a checkpoint of another one (`ckpt.from_run`), and what both must have in common: what the
checkpoint holds the state of. All else may differ: steps, rates, layout, memory recipe, environments, engines.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prl.config.errors import ConfigError, UserError
from prl.config.keys import as_override
from prl.config.other_run import no_run, read_other, refuse_unreadable
from prl.config.point import UNTRAINED
from prl.config.schema import LoraConfig, ModelConfig, OptimConfig, RunConfig

KEY = "ckpt.from_run"
RECORD = "branch.json"  # of a run directory: where its first checkpoint is from
BEGINNING, CHECKPOINTS = "beginning.json", "checkpoints"  # as `prl.runtime.directory` calls them
MOST_TOLD = 3  # keys of a model that is another one


def take_start(config: RunConfig) -> RunConfig:
    """The same with the other run's directory by its full path. Raises ConfigError with all that contradicts it.

    A run that has begun needs nothing of the other any more, which may be gone: whether it is there says `check_start`,
    once the run's own directory is known.
    """
    run = Path(str(config.ckpt.from_run)).expanduser().absolute()
    try:
        _, of_run, model = read_other(KEY, str(run))
    except ConfigError:
        return _with_path(config, run)
    try:
        contradictions = list(_contradictions(config, of_run, model))
    except (ValueError, KeyError, TypeError) as error:  # a key that it lacks has its default; another it must not have
        raise ConfigError([no_run(KEY, run)]) from error
    where, export = f"{KEY}={run}", run / "export"
    alone = f"; its weights alone: model.path={export} without {KEY}" if export.is_dir() else ""
    found = [
        UserError(
            f"The run that this one is to go on from has {told}.",
            where=f"{', '.join(f'{key}={as_override(value)}' for key, value in mine.items())}, {where}",
            why="a checkpoint holds the state of what was trained, and of its optimizer",
            fix=f"{fix}{alone}",
        )
        for mine, told, fix in contradictions
    ]
    if found:
        raise ConfigError(found)
    return _with_path(config, run)


def check_start(config: RunConfig) -> None:
    """Raise ConfigError where a run that has not begun yet, by its `output_dir`, lacks what it is to begin with."""
    begun = config.output_dir is not None and Path(config.output_dir, RECORD).expanduser().exists()
    if config.ckpt.from_run is None or begun:
        return
    run, _, _ = read_other(KEY, config.ckpt.from_run)
    refuse_unreadable(KEY, run, run / CHECKPOINTS, run / BEGINNING)
    if (wrong := _step_is_wrong(config, run)) is not None:
        raise ConfigError([wrong])


def _step_is_wrong(config: RunConfig, run: Path) -> UserError | None:
    """As far as names tell; whether the checkpoint is intact is looked at when the run begins."""
    saved = sorted(int(path.name[5:]) for path in (run / CHECKPOINTS).glob("step_*") if path.name[5:].isdecimal())
    step = config.ckpt.from_step
    if not saved or (step != "last" and step not in saved):
        return absent(run, step, saved)
    return nothing_left(run, step, config.max_steps) if step != "last" and step >= config.max_steps else None


def absent(run: Path, step: int | str, saved: list[int]) -> UserError:
    """saved: steps of which there are checkpoints."""
    return UserError(
        f"{run} has no checkpoint "
        + (f"of step {step}." if step != "last" else "that is intact." if saved else "yet."),
        where=f"{KEY}={run}, ckpt.from_step={step}",
        why=f"a run keeps its newest ckpt.keep checkpoints; here there are: {', '.join(map(str, saved)) or 'none'}",
        fix=f"{'another ckpt.from_step' if saved and step != 'last' else f'another {KEY}'}; later runs keep more with "
        "ckpt.interval and ckpt.keep",
    )


def nothing_left(run: Path, step: int, max_steps: int) -> UserError:
    return UserError(
        f"Nothing is left to train behind step {step} of {run}.",
        where=f"{KEY}={run}, max_steps={max_steps}",
        why="max_steps counts the steps before, too",
        fix=f"max_steps={2 * step}, or an earlier ckpt.from_step",
    )


def _with_path(config: RunConfig, run: Path) -> RunConfig:
    return config.model_copy(update={"ckpt": config.ckpt.model_copy(update={"from_run": str(run)})})


def _contradictions(
    config: RunConfig, of_run: dict[str, Any], model: ModelConfig
) -> Iterator[tuple[dict[str, Any], str, str]]:
    """Keys with their values here, what the other run has instead, and what to do."""
    if of_run["job"] != config.job:
        yield {"job": config.job}, f"job={of_run['job']}", f"python -m prl.{of_run['job']}"
        return
    mine, other = (card.model_dump(mode="json", exclude=UNTRAINED) for card in (config.model.card, model.card))
    differing = [key for key in mine if mine[key] != other[key]]
    if differing:
        told = ", ".join(f"model.card.{key}={as_override(other[key])}" for key in differing[:MOST_TOLD])
        more = f" and {len(differing) - MOST_TOLD} more keys of its own" * (len(differing) > MOST_TOLD)
        here = {f"model.card.{key}": mine[key] for key in differing[:MOST_TOLD]}
        yield here, f"{told}{more}", f"model={(of_run.get('choices') or {}).get('model', model.name)}, as there"
        return
    for key, here, there in _paired(config, of_run, model):
        if here != there:
            yield {key: here}, f"{key}={as_override(there)}", f"{key}={as_override(there)}"


def _paired(config: RunConfig, of_run: dict[str, Any], model: ModelConfig) -> Iterator[tuple[str, Any, Any]]:
    """Keys that say which tensors a checkpoint has, with their values here and there."""
    yield "model.tokenizer", config.model.tokenizer, model.tokenizer
    lora, other = config.memory_recipe.lora, LoraConfig.model_validate(of_run["memory_recipe"]["lora"])
    yield "memory_recipe.lora.rank", lora.rank, other.rank
    if lora.rank and other.rank:
        yield "memory_recipe.lora.targets", lora.targets, other.targets
        yield "memory_recipe.lora.alpha", lora.alpha, other.alpha
    optim, others = config.optim, OptimConfig.model_validate(of_run["optim"])
    yield "optim.type", optim.type, others.type
    if optim.type == others.type == "sgd" and not (optim.momentum and others.momentum):
        yield "optim.momentum", optim.momentum, others.momentum
    if config.model.card.index_topk and not (config.model.indexer_loss_coef and model.indexer_loss_coef):
        yield "model.indexer_loss_coef", config.model.indexer_loss_coef, model.indexer_loss_coef
