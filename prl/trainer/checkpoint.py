"""The trainer's part of a checkpoint: model, optimizer and random state through torch.distributed.checkpoint.

What is saved under one mesh can be loaded under another: DCP stores whole tensors' shards with their offsets. Frozen
weights (LoRA) are left out: every start, resumed ones too, reads them from the model's own checkpoint.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from prl.runtime.directory.checkpoints import TRAINER, full_disk_error, staging_dir
from prl.trainer.memory.optimizer_offload import master_weights
from prl.trainer.writer.failures import WriterDied, first_failure, no_space
from prl.trainer.writer.process import WriterProcess
from prl.trainer.writer.starting import Started

BEAT_S = 0.5


class TrainerCheckpointer:
    """Saves in the background and loads. At most one save is in flight; `finish` waits for it, calling `beat`."""

    def __init__(
        self,
        run_dir: Path,
        asynchronous: bool,
        beat: Callable[[], None] = lambda: None,
        started: Started | None = None,
    ) -> None:
        """`started`: the process that writes in the background, if there is one already."""
        self.run_dir, self.asynchronous, self.beat = run_dir, asynchronous, beat
        self.writer = WriterProcess(started) if asynchronous else None
        self.pending: tuple[int, Future[Any]] | None = None
        self.save_s = 0.0  # what the last save took, in the background; 0: there was none
        self.saved_step = -1  # newest step whose trainer part is on disk

    def prepare(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Once the optimizers have stepped: memory for the saves to come is allocated beside training."""
        if self.writer is not None:
            self.writer.prepare(self._state(model, optimizers))

    def save(self, step: int, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Start saving; the state is copied before this returns, so training may go on at once."""
        assert self.pending is None, "finish() the save before"
        started_s = time.monotonic()
        target = staging_dir(self.run_dir, step) / TRAINER
        state = self._state(model, optimizers)
        if self.writer is not None:
            self.pending = (step, self.writer.save(str(target), state))
        else:
            future: Future[Any] = Future()
            self.pending = (step, future)
            try:
                future.set_result(dcp.save(state, checkpoint_id=str(target)))
            except (Exception, dcp.api.CheckpointException) as error:  # delivered by finish(), as if asynchronous
                future.set_exception(error)
        self.pending[1].add_done_callback(lambda _: self._note_time(started_s))

    def _note_time(self, started_s: float) -> None:
        self.save_s = time.monotonic() - started_s

    def finish(self, wait: bool = True) -> int | None:
        """The step whose save has just completed, or None if there is none (or, with wait=False, none is done yet).

        Raises UserError when the disk is full, WriterDied when the process that writes was killed; the checkpoints
        before this one are untouched.
        """
        if self.pending is None or not (wait or self.pending[1].done()):
            return None
        step, future = self.pending
        self.pending = None
        while not future.done():
            self.beat()
            futures.wait([future], BEAT_S)
        try:
            future.result()
        except (Exception, dcp.api.CheckpointException) as error:  # DCP's own is a BaseException
            if no_space(error):
                shutil.rmtree(staging_dir(self.run_dir, step), ignore_errors=True)
                raise full_disk_error(self.run_dir, step) from error
            where, cause = first_failure(error)
            kind = WriterDied if isinstance(cause, WriterDied) else RuntimeError
            raise kind(f"the checkpoint of step {step} could not be written{where}: {cause}") from cause
        self.saved_step = step
        return step

    def load(self, path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        """Restore the state saved under `path` (a complete checkpoint directory).

        Optimizers keep the settings that they have: a run that goes on from another's checkpoint may have its own.
        """
        settings = [_settings(group) for optimizer in optimizers for group in optimizer.param_groups]
        state = self._state(model, optimizers)
        saved = dcp.FileSystemReader(str(path / TRAINER)).read_metadata().state_dict_metadata
        if not any(name.startswith(f"{_random_key()}.") for name in saved):  # saved by fewer ranks than there are now
            del state[_random_key()]
        dcp.load(state, checkpoint_id=str(path / TRAINER))
        set_state_dict(
            model,
            optimizers,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=StateDictOptions(strict=not frozen_names(model)),  # what is asked for was found, or load had failed
        )
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        for group, own in zip(groups, settings, strict=True):
            group.update(own)
        _set_random_state(state.get(_random_key()))

    def _state(self, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizers)
        for name in frozen_names(model):
            del model_state[name]
        model_state.update(master_weights(model, optimizers))
        return {"model": model_state, "optimizer": optimizer_state, _random_key(): _random_state()}


def frozen_names(model: nn.Module) -> set[str]:
    """Names, those of tied ones too, of the parameters that are not trained."""
    return {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group of an optimizer's parameters: rate, decay, betas and the like."""
    return {key: value for key, value in group.items() if key != "params"}


def _random_key() -> str:
    return f"random_state.{dist.get_rank()}"


def _random_state() -> dict[str, Any]:
    return {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}


def _set_random_state(state: dict[str, Any] | None) -> None:
    if state is None:
        return
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])
    random.setstate(state["python"])
