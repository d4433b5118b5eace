"""The alternative, measured beside ours: a plain transformers training loop on one device.

The model as `AutoModelForCausalLM` builds it, attention by SDPA, weights and AdamW's moments in model.dtype without
float32 masters, the logits of all tokens materialised, Hugging Face's gradient checkpointing on every layer if asked
for. Same tokens, same loss; the entropy, which nobody but us computes, is left out in its favour.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from prl.bench.measurement import MemoryWatch, StepRecord, Stopwatch, rank_report
from prl.bench.profile import profile_step
from prl.bench.rows import make_rows
from prl.bench.trainer import write_result
from prl.config.cards import card_to_hf_config
from prl.config.schema import ModelCard
from prl.metrics.mfu import FORMULA, packed_flops
from prl.models.device import pick_device
from prl.runtime.process.child import ChildContext
from prl.trainer.loops.rl_step import loss_denominator
from prl.trainer.losses import LOSSES, LossInputs
from prl.trainer.policy import seed_everything
from prl.transport.batch import MicroBatch


def main(ctx: ChildContext) -> None:
    """Entry of `trainer/0` with bench.target=transformers."""
    baseline = Baseline(ctx)
    report = baseline.run()
    write_result(ctx, [report], FORMULA, baseline.profile)


class Baseline:
    def __init__(self, ctx: ChildContext) -> None:
        config = ctx.plan.config
        assert config.bench is not None
        self.ctx, self.config, self.bench = ctx, config, config.bench
        seed_everything(config.seed, config.debug.deterministic)
        self.device = pick_device(config.deployment.device)
        self.memory = MemoryWatch(self.device)
        self.dtype = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
        self.model = build_transformers(config.model.card, self.dtype, self.device)
        if self.bench.baseline_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        optim = config.optim
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay, fused=True
        )
        self.profile: dict[str, Any] | None = None

    def run(self) -> dict[str, Any]:
        self.ctx.ready()
        records, warmup = [], self.bench.warmup_steps
        for step in range(1, warmup + self.bench.steps + 1):
            if step == warmup + 1:
                self.memory.end_warmup()
            records.append(self.measure_step(step))
            self.ctx.metrics.log(step=step, loss=records[-1].loss, **records[-1].phases_s)
        report = rank_report(records[warmup:], self.memory)
        if self.bench.profile:
            self.profile = profile_step(lambda: self.measure_step(warmup + self.bench.steps + 1), self.device)
        return report

    def measure_step(self, step: int) -> StepRecord:
        config, card = self.config, self.config.model.card
        rows = make_rows(self.bench, config.seq_len, card, config.seed, step, 0)
        trained = sum(int(row.loss_mask.sum()) for row in rows)
        denominator = loss_denominator(config.algo, trained, sum(len(row.doc_lens) for row in rows))
        watch = Stopwatch(self.device)
        losses = []
        for row in rows:
            self.ctx.beat()
            loss = self.loss(row) / denominator
            loss.backward()
            losses.append(loss.detach())
        watch.lap("forward_backward")
        if config.optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.optim.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        watch.lap("clip_optimizer")
        record = watch.record
        record.useful_tokens = sum(row.num_tokens for row in rows)
        record.padded_tokens = config.seq_len * len(rows)
        record.flops = sum(packed_flops(card, row.doc_lens.tolist())[0] for row in rows)
        record.loss = float(torch.stack(losses).sum())
        return record

    def loss(self, row: MicroBatch) -> Tensor:
        """The RL loss summed over one row's trained tokens; its documents are a right-padded batch."""
        input_ids, mask = pad_documents(row)
        input_ids, mask = input_ids.to(self.device), mask.to(self.device)
        padded = bool(len(set(row.doc_lens.tolist())) > 1)
        logits = self.model(input_ids, attention_mask=mask if padded else None, use_cache=False).logits  # [B, S, V]
        valid = mask[:, 1:].bool()
        predicted, targets = logits[:, :-1].float()[valid], input_ids[:, 1:][valid]
        logp = -F.cross_entropy(predicted, targets, reduction="none")
        trained = torch.from_numpy(row.loss_mask)
        doc_ids = torch.from_numpy(np.repeat(np.arange(len(row.doc_lens)), row.doc_lens))[trained].to(self.device)
        logp_infer = torch.from_numpy(row.logp_infer)[trained].to(self.device)
        advantages = torch.from_numpy(row.advantages)[trained].to(self.device)
        inputs = LossInputs(logp, logp_infer, advantages, doc_ids, len(row.doc_lens))
        return LOSSES[self.config.algo.loss](inputs, self.config.algo).sum()


def build_transformers(card: ModelCard, dtype: torch.dtype, device: torch.device) -> Any:
    """transformers' own model of the card's architecture, with random weights drawn on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = card_to_hf_config(card)
    config = AutoConfig.for_model(fields.pop("model_type"), **{k: v for k, v in fields.items() if k != "dtype"})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=dtype).train()


def pad_documents(row: MicroBatch) -> tuple[Tensor, Tensor]:
    """input_ids and attention mask [B, S] of a row's documents."""
    parts = torch.from_numpy(row.input_ids).split(row.doc_lens.tolist())
    input_ids = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
    mask = torch.arange(input_ids.shape[1])[None, :] < torch.from_numpy(row.doc_lens)[:, None]
    return input_ids, mask.long()
