"""The RL trainer: fetch a batch, take one optimizer step, publish the weights, repeat."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prl.metrics.mfu import utilisation
from prl.models.checkpoints.sources import resolve_model_path
from prl.runtime.directory.beginning import begun_path
from prl.runtime.process.child import ChildContext
from prl.runtime.process.collector import Collector
from prl.trainer.loops.batches import BatchClient
from prl.trainer.loops.export import export_policy
from prl.trainer.loops.guard import StepGuard
from prl.trainer.loops.kept_logp import KeptLogp
from prl.trainer.loops.publishing import RankWeights, publisher_of
from prl.trainer.loops.rl_step import backward_rl, loss_denominator
from prl.trainer.loops.saving import Saving, writer_before_world
from prl.trainer.loops.shared_fetch import SharedFetch
from prl.trainer.moments import now, seconds
from prl.trainer.policy import Policy, device_memory_bytes, make_room, peak_memory_bytes, seed_everything
from prl.trainer.world import World, join_world, largest_over_world, leave_world, meet, sum_over_data
from prl.trainer.writer.starting import Started
from prl.transport.batch import TrainBatch
from prl.transport.kinds import HOST_TRANSPORTS, NO_PUBLICATION
from prl.transport.weights_nccl import NcclPublisher

BEAT_S = 1.0


def main(ctx: ChildContext) -> None:
    """Entry of `trainer/<rank>` in an RL run."""
    writer = writer_before_world(ctx)
    world = join_world(ctx)
    try:
        RLTrainer(ctx, world, writer).run()
    finally:
        leave_world()


class RLTrainer:
    def __init__(self, ctx: ChildContext, world: World, writer: Started | None = None) -> None:
        self.ctx, self.world, self.config = ctx, world, ctx.plan.config
        seed_everything(self.config.seed + world.rank, self.config.debug.deterministic)
        found = resolve_model_path(self.config.model, Path(self.config.cache_dir), ctx.init_model_path)
        self.model_path = begun_path(ctx.run_dir, found) if ctx.resume_step else found
        self.policy = Policy(self.config, self.config.optim, self.config.max_steps, self.model_path, world)
        self.client = BatchClient(ctx.endpoints["orchestrator"], ctx.keys.train, self.check_neighbours)
        self.batches = SharedFetch(world, self.client)
        self.saving = Saving(ctx, world, self.client.start_commit, self.client.commit_took, writer)
        self.guard = StepGuard(self.config.optim.max_skipped_steps, ctx.run_dir, self.saving.settle)
        self.publisher = publisher_of(ctx, world, self.policy.model)
        self.weights = RankWeights(ctx.plan, world, self.policy.model, self.publisher)
        self.kept = KeptLogp(ctx, world)
        self.holds = self.config.weight_transport.type in HOST_TRANSPORTS  # a version, for who comes late
        self.poster = ThreadPoolExecutor(1, "publish")  # engines load weights while the trainer goes on
        self.announced: Future[None] | None = None
        self.publications = NO_PUBLICATION
        self.collector = Collector()

    def run(self) -> None:
        ctx = self.ctx
        self.saving.load(self.policy, self.model_path)
        self.guard.begin(self.policy.model)
        self.collector.begin()
        ctx.ready()
        self.client.wait_for_engines()
        self.publish(ctx.resume_step)
        step = ctx.resume_step
        while step < self.config.max_steps:
            started = time.perf_counter()
            batch = self.fetch_after(step)
            if batch.meta["stop"]:
                break
            waited = time.perf_counter() - started
            used = device_memory_bytes(self.world.device)
            row = self.train_step(batch) | used
            step += 1
            log = partial(self.log, step, row, waited, 0.0, time.perf_counter() - started)
            self.guard.check(step, row, self.policy.model, batch.meta["groups"], log)
            publish_s = self.publish(step)
            due = batch.meta["checkpoint"]
            row["save_s"] = self.saving.after_step(step, self.policy, due, changed=not row["step_skipped"])
            self.log(step, row, waited, publish_s, time.perf_counter() - started)
        self.end(step)

    def fetch_after(self, step: int) -> TrainBatch:
        """The batch that follows, or word to stop. What engines that came back need is published before."""
        while True:
            batch = self.batches.fetch(step + 1, self.publications)
            if not batch.meta["publish_again"]:
                return batch
            self.publish(step)

    # --- one step -----------------------------------------------------------------------------------------------------

    def train_step(self, batch: TrainBatch) -> dict[str, Any]:
        """Forward and backward over this rank's micro-batches, then the optimizer step. Returns this step's numbers."""
        started, begun = time.perf_counter(), now(self.world.device)
        denominator = loss_denominator(self.config.algo, batch.loss_tokens, batch.loss_docs)
        parts: list[torch.Tensor] = []
        kls: list[torch.Tensor] = []
        flops = 0.0
        wanted = set(batch.meta.get("kept_documents", ()))
        for micro in batch.micro_batches:
            self.ctx.beat()
            last = micro is batch.micro_batches[-1]
            stats = self.policy.forward(micro, self.config.inference.sampling.temperature, batch.loss_tokens, last)
            part, kl = backward_rl(self.config.algo, micro, stats, denominator)
            parts.append(part)
            kls.append(kl)
            flops += self.policy.flops(micro)
            self.kept.note(wanted, micro, stats)
        sums: list[float] = []

        def loss_of_all() -> float:
            sums.extend(sum_over_data(torch.stack(parts).sum(0).cpu(), self.world).tolist())
            return sums[0]

        self.collector.step(batch.step)  # while the device is busy with backward
        done = self.policy.optimizer_step(batch.step, loss_of_all)
        busy_s, forward_backward_s = time.perf_counter() - started, seconds(begun, done.backward_done)
        loss, entropy, mismatch, ratio, masked, tokens = sums
        mine = torch.cat(kls).cpu().numpy() if self.world.is_first_of_context else np.empty(0)
        self.kept.write(batch.step)
        tail = largest_over_world(mine, tokens=int(tokens))
        padded = self.config.seq_len * len(batch.micro_batches) * self.world.data_ranks
        useful = sum(m.num_tokens for m in batch.micro_batches)
        return {
            "loss": loss,
            "entropy": entropy / max(tokens, 1),
            "mismatch_kl_mean": mismatch / max(tokens, 1),
            "importance_ratio_mean": ratio / max(tokens, 1),
            "mismatch_kl_p999": float(tail[-1]) if tail.size else 0.0,
            "mismatch_kl_max": float(tail[0]) if tail.size else 0.0,
            "masked_fraction": masked / max(tokens, 1),
            "grad_norm": done.grad_norm,
            "step_skipped": int(not done.applied),
            "loss_tokens": batch.loss_tokens,
            "tokens": self._sum(useful),
            "run_tokens": self._sum(sum(m.run_tokens for m in batch.micro_batches)),
            "padded_tokens": padded,
            "forward_backward_s": forward_backward_s,
            "optim_s": busy_s - forward_backward_s,
            **self.policy.figures,
            **self.policy.compile_times(),
            **self.collector.row(),
            "flops": flops / self.world.cp,
        }

    def _sum(self, value: float) -> int:
        return int(sum_over_data(torch.tensor([value], dtype=torch.float64), self.world).item())

    # --- weights ------------------------------------------------------------------------------------------------------

    def publish(self, version: int) -> float:
        """Hand the weights of `version` to the engines; returns the seconds that the trainer itself spent on it."""
        started = time.perf_counter()
        self.publications += 1
        make_room(self.config, self.world.device)
        self.await_announced()
        if self.holds and self.publisher is not None:
            self.publisher.acknowledge()  # the version before: till now an engine that was restarted could fetch it

        def announce(update_info: dict[str, Any]) -> threading.Event:
            told = threading.Event()
            self.announced = self.poster.submit(self.announce, self.publications, version, update_info, told)
            return told

        self.weights.publish(version, announce)
        return time.perf_counter() - started

    def announce(self, publication: int, version: int, update_info: dict[str, Any], told: threading.Event) -> None:
        """In a thread: tell the orchestrator, and wait until engines have it. `told` is set when they hear of it."""
        payload = {"publication": publication, "version": version, "update_info": update_info}
        try:
            self.client.post("/train/weights", payload, self.config.weight_transport.timeout_s)
            self.client.wait_for_turn(publication)
        finally:
            told.set()
        taken = self.client.wait_for_delivery(publication)
        if not self.holds:
            assert self.publisher is not None
            if isinstance(self.publisher, NcclPublisher) and not taken:
                self.publisher.withdraw()
            self.publisher.acknowledge()

    def check_neighbours(self) -> None:
        """While waiting for a batch: show life, and notice when the weights could not be delivered."""
        self.ctx.beat()
        if self.announced is not None and self.announced.done():
            self.await_announced()

    def await_announced(self) -> None:
        """Until engines have what was published last: behind an evaluation, if there is one, and so with beats."""
        if self.announced is not None:
            while not self.announced.done():
                self.ctx.beat()
                wait([self.announced], BEAT_S)
            self.announced.result()
            self.announced = None

    def end(self, step: int) -> None:
        """Last checkpoint, export, goodbye."""
        finished = step >= self.config.max_steps
        if finished:
            self.guard.check_end()
        self.saving.end(step, self.policy, wanted=self.config.ckpt.at_end or not finished)
        if finished and self.config.ckpt.export_hf:
            export_policy(self.policy, self.model_path, self.ctx.run_dir / "export")
        meet()  # the orchestrator leaves upon the word of the first, and another may still be asking it
        self.await_announced()
        if isinstance(self.publisher, NcclPublisher):
            self.publisher.acknowledge()  # each rank sends, and the first has the store that they all use
        if self.config.weight_transport.type in ("nccl", "tcp"):
            meet()  # engines may still fetch from any rank
        if self.world.is_main:
            self.client.say_done(step)

    # --- metrics ------------------------------------------------------------------------------------------------------

    def log(self, step: int, row: dict[str, Any], waited: float, publish_s: float, step_s: float) -> None:
        busy_s = row["forward_backward_s"] + row["optim_s"]
        mfu, formula = utilisation(row.pop("flops"), busy_s, self.world.device.type, self.policy.flops_formula)
        self.ctx.metrics.log(
            step=step,
            policy_version=step,
            lr=self.policy.lr,
            **row,
            wait_for_batch_s=waited,
            publish_s=publish_s,
            step_s=step_s,
            tokens_per_s=row["tokens"] / step_s,
            train_tokens_per_s=row["tokens"] / busy_s,
            mfu=mfu,
            mfu_formula=formula,
            peak_memory_bytes=peak_memory_bytes(self.world.device),
        )
