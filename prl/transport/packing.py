"""Sequence packing: documents into rows of at most `seq_len` tokens, rows dealt out to data ranks.

All ranks compute their first rows, then their second ones (FSDP's collectives keep them together): a lap takes as long
as its longest row. What a document costs is a matter of FLOPs, whose attention grows with the square of its length, so
rows are dealt by `work`, and documents placed by it where that makes the laps' longest rows shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prl.transport.batch import MicroBatch
from prl.transport.documents import Document, items_of
from prl.transport.kept import KeptTokens

Work = Callable[[int], float]  # tokens of a document -> what it costs, in any unit
Lap = list[list[int]]  # a row (indices of what is packed) for each rank; empty: padding


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


def deal_rows(weights: Sequence[float], data_ranks: int) -> list[list[int]]:
    """Row indices per data rank: equally many for each (some may be padding, index -1), rows of like weight in a lap.

    Collectives need equal numbers of forward passes on every rank, hence the padding rows.
    """
    per_rank = -(-len(weights) // data_ranks)
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    ranks: list[list[int]] = [[] for _ in range(data_ranks)]
    for position, row in enumerate(order):
        lap, column = divmod(position, data_ranks)
        ranks[column if lap % 2 == 0 else data_ranks - 1 - column].append(row)  # there and back: evens out the loads
    return [rows + [-1] * (per_rank - len(rows)) for rows in ranks]


def build_micro_batch(documents: list[Document], shared: Sequence[int] = ()) -> MicroBatch:
    """Concatenate documents into one packed row. shared: of each one's first tokens, how many are those of the one
    before it and are run there; () where nothing is shared.
    """
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
        shared_lens=np.array(shared, dtype=np.int64) if any(shared) else None,
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


def pack_for_ranks(
    documents: list[Document], seq_len: int, data_ranks: int, work: Work = float, share: bool = False
) -> list[list[MicroBatch]]:
    """Documents -> for each data rank its packed rows; all ranks get equally many.

    Args:
        work: of a document of so many tokens.
        share: run once what documents have in common; seq_len bounds the tokens of a row that are run, and trained.
    """
    if not documents:
        return [[] for _ in range(data_ranks)]
    items = items_of(documents, seq_len, share)
    costs = [
        sum(work(len(documents[i])) - (work(common) if common else 0) for i, common in item.pairs()) for item in items
    ]
    laps = lay_out([item.tokens for item in items], costs, seq_len, data_ranks)

    def row_of(members: list[int]) -> MicroBatch | None:
        pairs = [pair for i in members for pair in items[i].pairs()]
        return build_micro_batch([documents[i] for i, _ in pairs], [common for _, common in pairs]) if pairs else None

    rows = [[row_of(members) for members in lap] for lap in laps]
    like = next(row for row in rows[0] if row is not None)
    return [[row or padding_micro_batch(like) for row in rank] for rank in zip(*rows, strict=True)]


def pack_laps(lengths: list[int], seq_len: int, data_ranks: int, work: Work) -> list[Lap]:
    """Of documents that share nothing: as `lay_out`."""
    return lay_out(lengths, [work(length) for length in lengths], seq_len, data_ranks)


def lay_out(lengths: list[int], costs: list[float], seq_len: int, data_ranks: int) -> list[Lap]:
    """As many laps as first-fit decreasing needs rows for, of two ways to fill them the shorter (`laps_work`): its rows
    sorted by work, or what is packed placed by its work. Deterministic.

    Args:
        lengths, costs: tokens of each thing that is packed, and the work that it is.
    """
    rows = pack_rows(lengths, seq_len)
    dealt = deal_rows([sum(costs[i] for i in row) for row in rows], data_ranks)
    laps = [[rows[i] if i >= 0 else [] for i in lap] for lap in zip(*dealt, strict=True)]
    if data_ranks == 1:
        return laps
    placed = _place_by_work(lengths, costs, seq_len, data_ranks, len(laps))
    return laps if placed is None or laps_work(laps, costs) <= laps_work(placed, costs) else placed


def laps_work(laps: list[Lap], costs: Sequence[float]) -> float:
    """Of the longest rows of all laps, one after another: what a step takes."""
    return sum(max(sum(costs[i] for i in row) for row in lap) for lap in laps)


def _place_by_work(
    lengths: list[int], costs: list[float], seq_len: int, data_ranks: int, laps: int
) -> list[Lap] | None:
    """Lap by lap, the costliest documents first, each into the row with the least work: up to the work of the
    costliest, or of an equal share of what is left where that is more. None where documents are left over.
    """
    left = sorted(range(len(lengths)), key=lambda i: (-costs[i], i))
    placed: list[Lap] = []
    totals = [0.0] * data_ranks
    while left and len(placed) < laps:
        share = sum(costs[i] for i in left) / (data_ranks * (laps - len(placed)))
        most = max(costs[left[0]], share) if len(placed) < laps - 1 else float("inf")
        rows: Lap = [[] for _ in range(data_ranks)]
        work, tokens, later = [0.0] * data_ranks, [0] * data_ranks, []
        for index in left:
            fits = [
                rank
                for rank in range(data_ranks)
                if tokens[rank] + lengths[index] <= seq_len and work[rank] + costs[index] <= most
            ]
            if not fits:
                later.append(index)
                continue
            rank = min(fits, key=work.__getitem__)
            rows[rank].append(index)
            work[rank] += costs[index]
            tokens[rank] += lengths[index]
        # the lap's longest row to the rank with the least so far
        by_total = sorted(range(data_ranks), key=totals.__getitem__)
        lap: Lap = [[] for _ in range(data_ranks)]
        for rank, row in zip(by_total, sorted(range(data_ranks), key=lambda r: -work[r]), strict=True):
            lap[rank] = rows[row]
            totals[rank] += work[row]
        placed.append(lap)
        left = later
    return None if left else placed
