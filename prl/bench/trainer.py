"""The benchmark's trainer ranks: the policy and the losses of real runs on made-up rows, timed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.bench.launch import RAW_RESULT
from prl.bench.measurement import MemoryWatch, StepRecord, Stopwatch, rank_report, summarise_ranks
from prl.bench.profile import profile_step
from prl.bench.rows import make_rows
from prl.config.world import shares_prefixes
from prl.metrics.mfu import peak_flops
from prl.models.checkpoints.sources import resolve_model_path
from prl.runtime.process.child import ChildContext
from prl.trainer.loops.rl_step import backward_rl, loss_denominator
from prl.trainer.policy import Policy, seed_everything
from prl.trainer.world import World, join_world, leave_world
from prl.transport.batch import MicroBatch


def main(ctx: ChildContext) -> None:
    """Entry of `trainer/<rank>` with bench.target=trainer_rl or trainer_sft."""
    world = join_world(ctx)
    try:
        bench = TrainerBench(ctx, world)
        report = bench.run()
        reports = gather_reports(report, world.size)
        if world.is_main:
            write_result(ctx, reports, bench.policy.flops_formula, bench.profile)
    finally:
        leave_world()


def gather_reports(report: dict[str, Any], size: int) -> list[dict[str, Any]]:
    """Those of all ranks, everywhere; as JSON, padded with spaces to the longest."""
    text = json.dumps(report).encode()
    longest = torch.tensor(len(text))
    dist.all_reduce(longest, dist.ReduceOp.MAX)
    mine = torch.tensor(list(text.ljust(int(longest))), dtype=torch.uint8)
    parts = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(parts, mine)
    return [json.loads(bytes(part.tolist())) for part in parts]


class TrainerBench:
    def __init__(self, ctx: ChildContext, world: World) -> None:
        config = ctx.plan.config
        assert config.bench is not None
        self.ctx, self.world, self.config, self.bench = ctx, world, config, config.bench
        seed_everything(config.seed + world.rank, config.debug.deterministic)
        self.memory = MemoryWatch(world.device)
        path = None
        if not self.bench.random_weights:
            path = resolve_model_path(config.model, Path(config.cache_dir))
        self.policy = Policy(config, config.optim, config.max_steps, path, world)
        self.profile: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        self.ctx.ready()
        records = []
        warmup = self.bench.warmup_steps
        for step in range(1, warmup + self.bench.steps + 1):
            if step == warmup + 1:
                self.memory.end_warmup()
            records.append(self.measure_step(step))
            self.ctx.metrics.log(step=step, loss=records[-1].loss, **records[-1].phases_s)
        report = rank_report(records[warmup:], self.memory)
        if self.bench.profile:
            self.profile = profile_step(lambda: self.measure_step(warmup + self.bench.steps + 1), self.world.device)
        return report

    def measure_step(self, step: int) -> StepRecord:
        """One optimizer step on rows of its own."""
        world, config = self.world, self.config
        card = config.model.card
        share = shares_prefixes(config)
        rows = make_rows(self.bench, config.seq_len, card, config.seed, step, world.data_rank, share)
        trained = self.over_world(sum(int(row.loss_mask.sum()) for row in rows))
        documents = self.over_world(sum(len(row.doc_lens) for row in rows))
        backward = self.backward_of(trained, documents)
        watch = Stopwatch(world.device)
        losses = []
        for row in rows:
            self.ctx.beat()
            losses.append(backward(row, row is rows[-1]))
        total = torch.stack(losses).sum()
        done = self.policy.optimizer_step(step, lambda: total.item())
        watch.lap("forward_backward", done.backward_done)
        watch.lap("clip_optimizer")
        record = watch.record
        record.useful_tokens = sum(row.num_tokens for row in rows) / world.cp
        record.padded_tokens = config.seq_len * len(rows) / world.cp
        record.flops = sum(self.policy.flops(row) for row in rows) / world.cp
        record.loss = total.item() / world.cp
        return record

    def over_world(self, mine: int) -> int:
        """A number of this data rank, summed over all data ranks."""
        total = torch.tensor([mine], dtype=torch.float64)
        dist.all_reduce(total)
        return round(total.item() / self.world.cp)

    def backward_of(self, trained: int, documents: int) -> Callable[[MicroBatch, bool], Tensor]:
        """Forward and backward of one row, and whether it is the step's last; returns its share of
        the loss, on the device.
        """
        algo = self.config.algo
        denominator = loss_denominator(algo, trained, documents)

        def rl(row: MicroBatch, last: bool) -> Tensor:
            stats = self.policy.forward(row, loss_tokens=trained, last=last)
            return backward_rl(algo, row, stats, denominator)[0][0]

        def sft(row: MicroBatch, last: bool) -> Tensor:
            loss = -self.policy.forward(row, loss_tokens=trained, last=last).logp.sum() / trained
            loss.backward()
            return loss.detach()

        return sft if self.bench.target == "trainer_sft" else rl


def write_result(
    ctx: ChildContext, reports: list[dict[str, Any]], formula: str, profile: dict[str, Any] | None
) -> None:
    """<run>/bench.json, where the root process finds it."""
    peak, source = peak_flops("cuda" if torch.cuda.is_available() else "cpu")
    result = summarise_ranks(reports, peak, f"({formula}) / step seconds / {peak:.4g} FLOP/s ({source})")
    if profile is not None:
        result["profile"] = profile
    (ctx.run_dir / RAW_RESULT).write_text(json.dumps(result, indent=1) + "\n")
