"""The trainer's log-probabilities of the documents that a run keeps for people (logging.rollouts)."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch
from torch import Tensor

from prl.metrics import rollouts as files
from prl.metrics.writer import plain_value
from prl.runtime.process.child import ChildContext
from prl.trainer.losses import mismatch_kl
from prl.trainer.policy import TokenStats
from prl.trainer.world import World
from prl.transport.batch import MicroBatch

SHARE = 0.25  # of the bytes on disk, of all ranks together
log = logging.getLogger("prl.trainer")


class KeptLogp:
    """One data rank's file in `<run>/rollouts/`. `note` keeps tensors where they are; `write` fetches them."""

    def __init__(self, ctx: ChildContext, world: World) -> None:
        config = ctx.plan.config.logging.rollouts
        self.kept: list[tuple[str, Tensor, np.ndarray]] = []  # name, trainer's and engine's
        self.log: files.SegmentedLog | None = None
        max_bytes = int((config.max_mib << 20) * SHARE / world.data_ranks)
        if config.groups and world.is_first_of_context:
            try:
                kind = f"{files.TRAINER}.{world.data_rank}"
                self.log = files.SegmentedLog(ctx.run_dir, kind, max_bytes, ctx.resume_step)
            except OSError as error:
                log.warning("log-probabilities are not kept for reading: %s", error)

    def note(self, wanted: set[str], micro: MicroBatch, stats: TokenStats) -> None:
        """Look for wanted documents in a micro-batch: [M] log-probabilities of its trained tokens, in order."""
        if self.log is None or not wanted:
            return
        ends = np.cumsum(micro.doc_lens)
        for begin, end in zip(ends - micro.doc_lens, ends, strict=True):
            name = files.document_name(micro.input_ids[begin:end])
            if name in wanted:
                mask = micro.loss_mask[begin:end]
                first, count = np.count_nonzero(micro.loss_mask[:begin]), np.count_nonzero(mask)
                logp = stats.logp.detach()[first : first + count]
                self.kept.append((name, logp, micro.logp_infer[begin:end][mask]))

    def write(self, step: int) -> None:
        """What was noted since the last call. A disk that is full costs the rows, not the run."""
        rows = [_row(step, *noted) for noted in self.kept]
        self.kept = []
        if self.log is not None:
            try:
                self.log.append(step, rows)
            except OSError as error:
                log.warning("log-probabilities of step %d are not kept: %s", step, error)


def _row(step: int, name: str, logp: Tensor, logp_infer: np.ndarray) -> dict[str, Any]:
    kl = mismatch_kl(logp.cpu(), torch.from_numpy(np.ascontiguousarray(logp_infer)))
    worst, mean = (float(kl.max()), float(kl.mean())) if len(kl) else (0.0, 0.0)
    packed = files.pack(logp.float().cpu().numpy(), "f")
    return plain_value({"step": step, "document": name, "mismatch": mean, "mismatch_max": worst, "logp": packed})
