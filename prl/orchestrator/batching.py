"""From the groups of a step to the bytes that each data rank of the trainer fetches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prl.orchestrator.rollouts.producer import StepGroups
from prl.orchestrator.rollouts.rollout import Rollout, Sample
from prl.transport.batch import MicroBatch, TrainBatch
from prl.transport.documents import Document
from prl.transport.frames import Message
from prl.transport.packing import Work, pack_for_ranks

MOST_LAGS = 63  # counted in rows in which none is so large


@dataclass
class EncodedStep:
    """What trainers fetch, and what is to be told of it."""

    messages: list[Message]  # one for each data rank
    lags: np.ndarray  # as `staleness` gives them
    imbalance: float = 1.0  # as `imbalance` does


def encode_step(
    step: StepGroups, seq_len: int, data_ranks: int, meta: dict[str, Any], work: Work = float, share: bool = False
) -> EncodedStep:
    """For a thread: nobody changes a finished rollout. numpy lets others run while it copies, which it does once. The
    samples lose their routing, which is in the batches from here on.
    """
    batches = build_batches(step, seq_len, data_ranks, meta, work, share)
    for group in step.groups:
        for rollout in group.finished:
            for sample in rollout.samples:
                _let_go(sample.routing)
    return EncodedStep([batch.to_message() for batch in batches], staleness(batches), imbalance(batches, work))


def lag_columns(lags: np.ndarray, bound: int) -> dict[str, Any]:
    """Mean, largest and counts (of lag 0, 1, ...) for a step's row of metrics. The counts reach to `bound` at least, so
    that rows are alike, but not for a bound that only means "none".
    """
    return {
        "staleness_mean": float(lags.mean()) if lags.size else 0.0,
        "staleness_max": int(lags.max(initial=0)),
        "staleness_hist": np.bincount(lags, minlength=min(bound, MOST_LAGS) + 1).tolist(),
    }


def release(steps: list[EncodedStep]) -> None:
    """For a thread: forget batches that no trainer asks for any more. Who still sends one has its own references."""
    for step in steps:
        for message in step.messages:
            _let_go(message.parts)


def _let_go(arrays: list[Any]) -> None:
    """One at a time: to give gigabytes back takes a second, in which other threads want to run."""
    while arrays:
        arrays.pop()


def imbalance(batches: list[TrainBatch], work: Work) -> float:
    """Of a step: what its laps take (`prl.transport.packing`) over what they would with all ranks busy; 1 is even."""
    rows = [[_work_of(row, work) for row in batch.micro_batches] for batch in batches]
    total = sum(map(sum, rows))
    return sum(map(max, zip(*rows, strict=True))) * len(batches) / total if total else 1.0


def _work_of(row: MicroBatch, work: Work) -> float:
    shared = () if row.shared_lens is None else row.shared_lens
    return sum(work(int(n)) for n in row.doc_lens) - sum(work(int(n)) for n in shared if n)


def build_batches(
    step: StepGroups, seq_len: int, data_ranks: int, meta: dict[str, Any], work: Work = float, share: bool = False
) -> list[TrainBatch]:
    """One TrainBatch per data rank. Samples longer than seq_len are cut at the end (counted in the metrics as
    truncated). share: as in `pack_for_ranks`.
    """
    documents = [
        to_document(sample, rollout, seq_len)
        for group in step.groups
        for rollout in group.finished
        for sample in rollout.samples
    ]
    loss_tokens = sum(int(np.count_nonzero(d.loss_mask)) for d in documents)
    loss_docs = sum(bool(np.any(d.loss_mask)) for d in documents)
    return [
        TrainBatch(step.step, micro_batches, loss_tokens, loss_docs, meta)
        for micro_batches in pack_for_ranks(documents, seq_len, data_ranks, work, share)
    ]


def to_document(sample: Sample, rollout: Rollout, seq_len: int) -> Document:
    """A rollout's advantage spread over the tokens that it sampled."""
    cut = slice(0, seq_len)
    loss_mask = np.asarray(sample.loss_mask).view(bool)[cut]
    return Document(
        input_ids=np.asarray(sample.input_ids)[cut],
        loss_mask=loss_mask,
        logp_infer=np.asarray(sample.logp_infer)[cut],
        advantages=sample.advantages(rollout.advantage)[cut],
        versions=np.asarray(sample.versions)[cut],
        routed_experts=sample.routed_experts(len(loss_mask)),
        kept=None if sample.kept is None else sample.kept.fit(len(loss_mask)),
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
