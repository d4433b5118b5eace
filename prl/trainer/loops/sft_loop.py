"""Supervised fine-tuning: the job of `python -m prl.sft`, and the warm start of `python -m prl.rl`."""

from __future__ import annotations

import time
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from prl.metrics.mfu import utilisation
from prl.metrics.reader import read_rows
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.text.chat import ChatRenderer
from prl.models.text.tokenizer import check_template, load_tokenizer
from prl.runtime.directory.beginning import begun_path
from prl.runtime.directory.checkpoints import parts_of
from prl.runtime.directory.commits import Committer
from prl.runtime.process.child import ChildContext
from prl.runtime.process.collector import Collector
from prl.trainer.loops.export import export_policy
from prl.trainer.loops.guard import StepGuard
from prl.trainer.loops.saving import Saving, writer_before_world
from prl.trainer.loops.sft_data import load_sft_data
from prl.trainer.policy import Policy, peak_memory_bytes, seed_everything
from prl.trainer.world import World, join_world, leave_world, sum_over_data, sum_over_world
from prl.trainer.writer.starting import Started
from prl.transport.batch import MicroBatch
from prl.transport.packing import deal_rows, padding_micro_batch

COMMIT_WAIT_S = 0.05  # between two looks whether a checkpoint is complete


def main(ctx: ChildContext) -> None:
    """Entry of `trainer/<rank>` in an SFT run."""
    writer = writer_before_world(ctx)
    world = join_world(ctx)
    try:
        SftTrainer(ctx, world, writer).run()
    finally:
        leave_world()


class SftTrainer:
    def __init__(self, ctx: ChildContext, world: World, writer: Started | None = None) -> None:
        assert ctx.plan.config.sft is not None
        self.ctx, self.world, self.config, self.sft = ctx, world, ctx.plan.config, ctx.plan.config.sft
        seed_everything(self.config.seed + world.rank, self.config.debug.deterministic)
        found = resolve_model_path(self.config.model, Path(self.config.cache_dir), ctx.init_model_path)
        self.model_path = begun_path(ctx.run_dir, found) if ctx.resume_step else found
        tokenizer = load_tokenizer(self.config.model, self.model_path)
        check_template(tokenizer, self.config.model, self.model_path)
        renderer = ChatRenderer(tokenizer)
        load = partial(load_sft_data, self.sft, renderer=renderer, seed=self.config.seed,
                       context=self.config.model.card.max_position_embeddings)  # fmt: skip
        self.data = load("train")
        self.val_rows = load("held_out").one_epoch()[: self.sft.val_rows]
        self.policy = Policy(self.config, self.sft.optim, self.sft.max_steps, self.model_path, world)
        committer = Committer(
            ctx.run_dir, self.config.ckpt.keep, parts_of("sft"), self.config.deployment.hang_timeout_s
        )
        self.saving = Saving(ctx, world, committer.start, partial(committer.took, wait_s=COMMIT_WAIT_S), writer)
        self.collector = Collector()
        self.guard = StepGuard(self.sft.optim.max_skipped_steps, ctx.run_dir, self.saving.settle)

    def run(self) -> None:
        step = self.ctx.resume_step
        self.saving.load(self.policy, self.model_path)
        self.guard.begin(self.policy.model)
        self.collector.begin()
        rows = self.data.rows(skip=step * self.sft.batch_size)
        self.ctx.ready()
        reached = self.had_reached(step)
        while step < self.sft.max_steps and not reached and not self.stop_requested():
            started = time.perf_counter()
            step += 1
            row = self.train_step(step, list(islice(rows, self.sft.batch_size)))
            log = partial(self.log, step, row, time.perf_counter() - started)
            self.guard.check(step, row, self.policy.model, [], log)
            if self.sft.val_interval and (step % self.sft.val_interval == 0 or step == self.sft.max_steps):
                validating = time.perf_counter()
                row["val_loss"] = self.validate()
                row["val_s"] = time.perf_counter() - validating
                reached = row["val_loss"] <= self.sft.target_val_loss
            self.log(step, row, time.perf_counter() - started)
            due = bool(self.config.ckpt.interval) and step % self.config.ckpt.interval == 0
            self.saving.after_step(step, self.policy, due, changed=not row["step_skipped"])
        self.end(step, finished=reached or step >= self.sft.max_steps)

    def had_reached(self, step: int) -> bool:
        """Whether the attempt that left the checkpoint of `step` had reached its target there: all ranks go by the
        first one's metrics.
        """
        reached = False
        if self.world.is_main and step:
            rows = read_rows(self.ctx.run_dir, self.ctx.role.name)
            losses = [row["val_loss"] for row in rows if row["step"] == step and "val_loss" in row]
            reached = any(loss <= self.sft.target_val_loss for loss in losses)
        return bool(sum_over_world(torch.tensor([float(reached)])).item())

    def stop_requested(self) -> bool:
        """Whether any rank was asked to stop: all ranks must leave the loop at the same step."""
        self.ctx.beat()
        return bool(sum_over_world(torch.tensor([float(self.ctx.stop_requested)])).item())

    # --- steps --------------------------------------------------------------------------------------------------------

    def share(self, rows: list[MicroBatch]) -> list[MicroBatch]:
        """This data rank's rows."""
        mine = deal_rows([self.policy.flops(row) for row in rows], self.world.data_ranks)[self.world.data_rank]
        return [rows[i] if i >= 0 else padding_micro_batch(rows[0]) for i in mine]

    def train_step(self, step: int, rows: list[MicroBatch]) -> dict[str, Any]:
        started = time.perf_counter()
        targets = sum(int(row.loss_mask.sum()) for row in rows)
        parts, flops = [], 0.0  # on the device: the host does not wait between micro-batches
        mine = self.share(rows)
        for micro in mine:
            share = -self.policy.forward(micro, loss_tokens=targets, last=micro is mine[-1]).logp.sum() / targets
            share.backward()
            parts.append(share.detach().double())
            flops += self.policy.flops(micro)
        losses: list[float] = []

        def loss_of_all() -> float:
            losses.append(sum_over_data(torch.stack(parts).sum().cpu().view(1), self.world).item())
            return losses[0]

        self.collector.step(step)  # while the device is busy with backward
        done = self.policy.optimizer_step(step, loss_of_all)
        busy_s = time.perf_counter() - started
        mfu, formula = utilisation(flops, busy_s, self.world.device.type, self.policy.flops_formula)
        tokens = sum(row.num_tokens for row in rows)
        return {
            "loss": losses[0],
            "grad_norm": done.grad_norm,
            "step_skipped": int(not done.applied),
            "lr": self.policy.lr,
            **self.policy.figures,
            **self.policy.compile_times(),
            "loss_tokens": targets,
            "tokens": tokens,
            "padded_tokens": self.sft.seq_len * len(rows),
            "documents_left_out": self.data.dropped,
            "tokens_per_s": tokens / busy_s,
            "mfu": mfu,
            "mfu_formula": formula,
            **self.collector.row(),
        }

    @torch.no_grad()
    def validate(self) -> float:
        """Mean loss per target token over the held-out rows (nats)."""
        sums = torch.zeros(2, dtype=torch.float64)
        for micro in self.share(self.val_rows):
            logp = self.policy.forward(micro).logp
            sums += torch.tensor([-logp.sum().item(), len(logp)], dtype=torch.float64)
        total, count = sum_over_data(sums, self.world).tolist()
        return total / max(count, 1)

    # --- end, metrics -------------------------------------------------------------------------------------------------

    def end(self, step: int, finished: bool) -> None:
        if finished:
            self.guard.check_end()
        self.saving.end(step, self.policy, wanted=self.config.ckpt.at_end or not finished)
        if finished and self.config.ckpt.export_hf:
            export_policy(self.policy, self.model_path, self.ctx.run_dir / "export")

    def log(self, step: int, row: dict[str, Any], step_s: float) -> None:
        self.ctx.metrics.log(step=step, **row, step_s=step_s, peak_memory_bytes=peak_memory_bytes(self.world.device))
