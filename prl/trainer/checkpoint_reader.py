"""A trainer's checkpoint as a Hugging Face directory, for evaluations: one process, on the host, without a world."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed.checkpoint as dcp

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.models.adapters.lora import apply_lora
from prl.models.checkpoints.reading import load_checkpoint
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.checkpoints.writing import export_checkpoint, hf_tensors
from prl.models.layers.decoder import Decoder
from prl.runtime.directory.beginning import begun_path, refuse_other_weights
from prl.runtime.directory.checkpoints import TRAINER, step_dir
from prl.runtime.directory.evaluation import CONVERTED, read_source
from prl.runtime.directory.files import PARTIAL
from prl.runtime.policy_source import read_run, start_of
from prl.runtime.process.child import ChildContext
from prl.trainer.checkpoint import frozen_names
from prl.trainer.parallelize import build_meta, compute_dtype

T = TypeVar("T")


def main(ctx: ChildContext) -> None:
    """Reads what policy.json of the evaluation names; its directory is the one around this stage's."""
    ctx.ready()
    evaluation = ctx.run_dir.parent
    source = read_source(evaluation)
    run = Path(source["run"])
    config = read_run(run).config
    began = begun_path(run, resolve_model_path(config.model, Path(config.cache_dir), _text(start_of(config))))
    saved = step_dir(run, source["step"]) / TRAINER
    if config.memory_recipe.lora.rank or (config.model.card.index_topk and not config.model.indexer_loss_coef):
        refuse_other_weights(run, began, "frozen weights")
    try:
        model = read_policy(config, began, saved)
    except Exception as error:
        if saved.is_dir() and (saved / ".metadata").is_file():
            raise
        raise dropped(run, source["step"]) from error
    partial = evaluation / f"{CONVERTED}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    export_checkpoint(model, _with_beats(hf_tensors(model), ctx), began, partial, config.model.card)
    os.rename(partial, evaluation / CONVERTED)


def dropped(run: Path, step: int) -> UserError:
    return UserError(
        f"The checkpoint of step {step} was dropped while it was read.",
        where=f"eval.run={run}, eval.step={step}",
        why="its run goes on, and keeps its newest ckpt.keep checkpoints",
        fix="eval.step=last, the newest whenever it is; later runs keep more with ckpt.keep",
    )


@torch.no_grad()
def read_policy(config: RunConfig, began: Path, saved: Path) -> Decoder:
    """The whole model of a checkpoint, in float32, on the host.

    Args:
        began: what training started from; frozen weights (LoRA) are read from there.
        saved: the trainer's part of a checkpoint.
    """
    model = build_meta(config, began)
    lora = config.memory_recipe.lora
    if lora.rank:
        apply_lora(model, lora, compute_dtype(config))
    model.to_empty(device="cpu")
    if lora.rank:
        load_checkpoint(model, began)
    frozen = frozen_names(model)
    wanted = {name: tensor for name, tensor in model.state_dict().items() if name not in frozen}
    known = dcp.FileSystemReader(str(saved)).read_metadata().state_dict_metadata
    missing = [name for name in wanted if f"model.{name}" not in known]
    if missing:
        raise UserError(
            f"The checkpoint lacks {len(missing)} tensors, among them {missing[0]}.",
            where=str(saved),
            why="it is not one of this run's model",
            fix="another eval.step, or model.path=DIRECTORY of an export",
        )
    dcp.load({"model": wanted}, checkpoint_id=str(saved), no_dist=True)
    return model


def _with_beats(tensors: Iterable[T], ctx: ChildContext) -> Iterator[T]:
    for tensor in tensors:
        ctx.beat()
        yield tensor


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
