"""When a trainer saves: its part in the background on all ranks, then the commit of the whole, both beside training.

Who commits differs: the orchestrator, or in SFT the first rank itself. All ranks come to each save together.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from prl.models.checkpoints.further_layers import further_layers
from prl.models.device import pick_device
from prl.models.layers.decoder import Decoder
from prl.runtime.directory.beginning import note_beginning, refuse_other_weights
from prl.runtime.directory.checkpoints import step_dir
from prl.runtime.directory.stop_notice import seconds_left
from prl.runtime.process.child import ChildContext
from prl.trainer.checkpoint import TrainerCheckpointer, frozen_names
from prl.trainer.policy import Policy
from prl.trainer.world import World, sum_over_world
from prl.trainer.writer.starting import Started, forked

UNLIMITED_S = 1e9
CAUTION = 1.3  # a shared disk is not always equally fast
log = logging.getLogger("prl")


def writer_before_world(ctx: ChildContext) -> Started | None:
    """The process that writes checkpoints, begun while this one has no threads and has not looked for GPUs."""
    config = ctx.plan.config
    on_cpu = pick_device(config.deployment.device).type == "cpu"
    return forked() if config.ckpt.asynchronous and on_cpu and sys.platform == "linux" else None


def what_stays(model: Decoder, model_path: Path) -> str:
    """In words, what of the weights at `model_path` is trained by nobody, so that no checkpoint has it; else ""."""
    frozen = frozen_names(model)
    with further_layers(model, model_path) as further:
        found = [(any("indexer" not in name for name in frozen), "frozen weights"), (frozen, "frozen indexers")]
        kinds = [words for there, words in found if there][:1] + ["further layers"] * bool(further.slices)
    return " and ".join(kinds)


class Saving:
    """The checkpoints of one run, from its trainer's side."""

    def __init__(
        self,
        ctx: ChildContext,
        world: World,
        start_commit: Callable[[int, bool], object],
        commit_took: Callable[[int], float | None],
        writer: Started | None = None,
    ) -> None:
        """The two are called on the first rank: `start_commit` (of a step, in haste or not) returns at once;
        `commit_took` gives the seconds, or None while it has not ended, raises what went wrong, and may wait a little.
        `writer`: of `writer_before_world`.
        """
        self.ctx, self.world = ctx, world
        self.start_commit, self.commit_took = start_commit, commit_took
        self.checkpointer = TrainerCheckpointer(ctx.run_dir, ctx.plan.config.ckpt.asynchronous, ctx.beat, writer)
        self.due = self.prepared = False
        self.idle_steps = 0  # in a row, that changed nothing
        self.uncommitted: int | None = None  # saved last; its commit has begun
        self.in_haste = False
        self.commit_s = 0.0  # what the last one took; 0: there was none

    def load(self, policy: Policy, model_path: Path) -> None:
        """The state of the step to resume from, if there is one. Raises UserError where the weights at `model_path`,
        of which some are read again, are not those that the run began with.
        """
        step, run_dir = self.ctx.resume_step, self.ctx.run_dir
        if self.world.is_main and not step:
            note_beginning(run_dir, model_path)
        elif self.world.is_main and (frozen := what_stays(policy.model, model_path)):
            refuse_other_weights(run_dir, model_path, frozen)
        if step:
            self.checkpointer.load(step_dir(self.ctx.run_dir, step), policy.model, policy.optimizers)

    def start(self, step: int, policy: Policy) -> None:
        """Begin the checkpoint of `step`, once the one before is complete: disk space for two at most is needed."""
        self.settle()
        self.checkpointer.save(step, policy.model, policy.optimizers)

    def after_step(self, step: int, policy: Policy, due: bool, changed: bool) -> float:
        """Between two steps: have committed what has been saved meanwhile, and begin what is due. Returns for how many
        seconds that has held up training.

        A step that changed nothing (see `guard.py`) makes no checkpoint; the next one does that changes something.
        """
        started = time.perf_counter()
        self._commit_saved(wait=False)
        self.idle_steps = 0 if changed else self.idle_steps + 1
        self.due |= due
        if changed and not self.prepared:
            self.prepared = True
            self.checkpointer.prepare(policy.model, policy.optimizers)
        if self.due and changed:
            self.due = False
            self.start(step, policy)
        return time.perf_counter() - started

    def settle(self) -> None:
        """Until all that was begun is committed: without a limit, showing life."""
        self._commit_saved(wait=True)
        step, self.uncommitted = self.uncommitted, None
        if step is not None:
            while self._waits_for(step):
                self.ctx.beat()

    def end(self, step: int, policy: Policy, wanted: bool) -> None:
        """The last checkpoint, unless it is there already or not `wanted`, as far as a stop leaves time for it.

        None after several steps that changed nothing, either: the weights that they began with may be what spoilt them.
        """
        self.ctx.saving(True)
        self.settle()
        missing = step > 0 and step not in (self.checkpointer.saved_step, self.ctx.resume_step)
        if wanted and missing and self.idle_steps < 2 and self._fits(step):
            self.start(step, policy)
            self.settle()
        self.ctx.saving(False)

    def _fits(self, step: int) -> bool:
        """Whether the time left is enough for a checkpoint, by what the last one took; maybe without checksums."""
        mine = torch.zeros(3, dtype=torch.float64)
        if self.world.is_main:  # whose clock counts
            left_s = min(seconds_left(self.ctx.run_dir), UNLIMITED_S)
            mine = torch.tensor([left_s, self.checkpointer.save_s, self.commit_s], dtype=torch.float64)
        left_s, save_s, commit_s = sum_over_world(mine).tolist()
        if left_s >= UNLIMITED_S:
            return True
        self.in_haste = left_s < CAUTION * (save_s + commit_s)
        fits = left_s > CAUTION * save_s
        how = "without checksums" if self.in_haste else "in full"
        log.warning(
            "step %d: %.0f s are left, the last checkpoint took %.0f s and %.0f s to commit: %s",
            *(step, left_s, save_s, commit_s, f"saved {how}" if fits else "no checkpoint fits, the one before stays"),
        )
        return fits

    def _commit_saved(self, wait: bool) -> None:
        # DCP's coordinator is rank 0: its save completes only after every rank has written its shards
        step = self.checkpointer.finish(wait)
        if step is not None:
            self.uncommitted = step
            if self.world.is_main:
                self.start_commit(step, self.in_haste)

    def _waits_for(self, step: int) -> bool:
        """Whether the first rank does; all ranks learn it together."""
        took_s = self.commit_took(step) if self.world.is_main else 0.0
        self.commit_s = took_s or self.commit_s
        waits = took_s is None
        return bool(sum_over_world(torch.tensor([float(waits)])).item())
