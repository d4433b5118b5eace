"""Sequence packing: documents into rows of at most `seq_len` tokens, rows dealt out to data ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prl.transport.batch import MicroBatch
from prl.transport.kept import KeptTokens


@dataclass
class Document:
    """One training sequence, aligned as in `prl.transport.batch`."""

    input_ids: Sequence[int] | np.ndarray
    loss_mask: Sequence[bool] | np.ndarray
    logp_infer: Sequence[float] | np.ndarray
    advantages: Sequence[float] | np.ndarray
    versions: Sequence[int] | np.ndarray
    routed_experts: list[np.ndarray] | None = None  # [some tokens, L, K] uint8 or uint16 each, T together
    kept: KeptTokens | None = None  # of truncated sampling

    def __len__(self) -> int:
        return len(self.input_ids)


def pack_rows(lengths: list[int], seq_len: int) -> list[list[int]]:
    """First-fit decreasing: document indices per row, each row's lengths summing to at most seq_len.

    Deterministic (ties by index). A document longer than seq_len raises ValueError: cutting it is the caller's
    decision.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rows: list[list[int]] = []
    room: list[int] = []
    for index in order:
        if lengths[index] > seq_len:
            raise ValueError(f"document {index} has {lengths[index]} tokens, more than seq_len={seq_len}")
        for row, left in enumerate(room):
            if lengths[index] <= left:
                rows[row].append(index)
                room[row] -= lengths[index]
                break
        else:
            rows.append([index])
            room.append(seq_len - lengths[index])
    return rows


def deal_rows(weights: list[int], data_ranks: int) -> list[list[int]]:
    """Row indices per data rank: equally many for each (some may be padding, index -1), heavy rows spread.

    Collectives need equal numbers of forward passes on every rank, hence the padding rows.
    """
    per_rank = -(-len(weights) // data_ranks)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    ranks: list[list[int]] = [[] for _ in range(data_ranks)]
    for position, row in enumerate(order):
        lap, column = divmod(position, data_ranks)
        ranks[column if lap % 2 == 0 else data_ranks - 1 - column].append(row)  # there and back: evens out the loads
    return [rows + [-1] * (per_rank - len(rows)) for rows in ranks]


def build_micro_batch(documents: list[Document]) -> MicroBatch:
    """Concatenate documents into one packed row."""
    recorded = [d.routed_experts for d in documents if d.routed_experts is not None]
    assert len(recorded) in (0, len(documents)), "routing must be recorded for all documents of a row or for none"
    routed = [piece for pieces in recorded for piece in pieces]
    kept = None
    if any(d.kept is not None for d in documents):
        kept = KeptTokens.join(d.kept or KeptTokens.whole(len(d)) for d in documents)
    return MicroBatch(
        input_ids=np.concatenate([np.asarray(d.input_ids, dtype=np.int64) for d in documents]),
        positions=np.concatenate([np.arange(len(d), dtype=np.int64) for d in documents]),
        doc_lens=np.array([len(d) for d in documents], dtype=np.int64),
        loss_mask=np.concatenate([np.asarray(d.loss_mask, dtype=bool) for d in documents]),
        logp_infer=np.concatenate([np.asarray(d.logp_infer, dtype=np.float32) for d in documents]),
        advantages=np.concatenate([np.asarray(d.advantages, dtype=np.float32) for d in documents]),
        versions=np.concatenate([np.asarray(d.versions, dtype=np.int32) for d in documents]),
        routed_experts=np.concatenate(routed) if routed else None,
        kept_counts=None if kept is None else kept.counts,
        kept_ids=None if kept is None else kept.ids,
    )


def padding_micro_batch(like: MicroBatch) -> MicroBatch:
    """The shortest valid row that trains nothing: one document of two tokens, fully masked."""
    routed = None if like.routed_experts is None else like.routed_experts[:2]
    zeros = np.zeros(2, dtype=np.float32)
    return MicroBatch(
        input_ids=like.input_ids[:2],
        positions=np.arange(2, dtype=np.int64),
        doc_lens=np.array([2], dtype=np.int64),
        loss_mask=np.zeros(2, dtype=bool),
        logp_infer=zeros,
        advantages=zeros,
        versions=np.full(2, -1, dtype=np.int32),
        routed_experts=routed,
    )


def pack_for_ranks(documents: list[Document], seq_len: int, data_ranks: int) -> list[list[MicroBatch]]:
    """Documents -> for each data rank its packed rows; all ranks get equally many."""
    rows = [build_micro_batch([documents[i] for i in row]) for row in pack_rows([len(d) for d in documents], seq_len)]
    dealt = deal_rows([row.num_tokens for row in rows], data_ranks)
    return [[rows[i] if i >= 0 else padding_micro_batch(rows[0]) for i in rank] for rank in dealt]
