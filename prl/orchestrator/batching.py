"""From the groups of a step to the bytes that each data rank of the trainer fetches."""

from __future__ import annotations

from typing import Any

import numpy as np

from prl.orchestrator.producer import StepGroups
from prl.orchestrator.rollout import Rollout, Sample
from prl.transport.batch import TrainBatch
from prl.transport.packing import Document, pack_for_ranks


def build_batches(step: StepGroups, seq_len: int, data_ranks: int, meta: dict[str, Any]) -> list[TrainBatch]:
    """One TrainBatch per data rank. Samples longer than seq_len are cut at the end (counted in the metrics as
    truncated).
    """
    documents = [
        to_document(sample, rollout, seq_len)
        for group in step.groups
        for rollout in group.finished
        for sample in rollout.samples
    ]
    loss_tokens = sum(sum(d.loss_mask) for d in documents)
    loss_docs = sum(any(d.loss_mask) for d in documents)
    return [
        TrainBatch(step.step, micro_batches, loss_tokens, loss_docs, meta)
        for micro_batches in pack_for_ranks(documents, seq_len, data_ranks)
    ]


def to_document(sample: Sample, rollout: Rollout, seq_len: int) -> Document:
    """A rollout's advantage spread over the tokens that it sampled."""
    cut = slice(0, seq_len)
    length = min(len(sample.input_ids), seq_len)
    return Document(
        input_ids=sample.input_ids[cut],
        loss_mask=sample.loss_mask[cut],
        logp_infer=sample.logp_infer[cut],
        advantages=[rollout.advantage if trained else 0.0 for trained in sample.loss_mask[cut]],
        versions=sample.versions[cut],
        routed_experts=None if sample.routed_experts is None else sample.routed_experts[cut],
        kept=None if sample.kept is None else sample.kept.fit(length),
    )


def staleness(batches: list[TrainBatch]) -> np.ndarray:
    """Lag in optimizer steps of every trained token of a step, [tokens] int32."""
    lags = [
        batch.step - 1 - micro.versions[micro.loss_mask]
        for batch in batches
        for micro in batch.micro_batches
        if micro.loss_mask.any()
    ]
    return np.concatenate(lags) if lags else np.zeros(0, dtype=np.int32)
