"""Writes model.path as the trainer holds it, for engines to begin with: one process, on the host, without a world."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from prl.config.config_json import card_of_impl, check_card
from prl.config.errors import UserError
from prl.models.checkpoints.plain import write_plain
from prl.models.checkpoints.sources import resolve_model_path
from prl.runtime.directory.files import read_object
from prl.runtime.process.child import ChildContext
from prl.runtime.warm_cache import TARGET
from prl.trainer.parallelize import build_meta, compute_dtype


def main(ctx: ChildContext) -> None:
    """Reads where to write from the stage's directory. Raises UserError for a checkpoint that is damaged or another's
    than the card's.
    """
    ctx.ready()
    config = ctx.plan.config
    torch.set_num_threads(config.debug.num_threads or len(os.sched_getaffinity(0)))  # nothing else runs meanwhile
    source = resolve_model_path(config.model, Path(config.cache_dir), ctx.init_model_path)
    check_card(source, card_of_impl(config.model))
    target = Path((read_object(ctx.run_dir / TARGET) or {})["target"])
    try:
        write_plain(build_meta(config, source), source, target, compute_dtype(config), ctx.beat)
    except ValueError as error:
        raise UserError(
            f"the checkpoint cannot be loaded: {error}",
            where=str(source),
            why="its files are incomplete, or are those of another model",
            fix="fetch the checkpoint again, or correct model.path",
        ) from error
