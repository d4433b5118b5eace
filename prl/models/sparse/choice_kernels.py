# mypy: allow-untyped-defs, allow-untyped-calls
"""The choice of keys on CUDA, in Triton: scores of a block of queries in float32, then the best of every row. These are
found by their digits, from the highest: four histograms, and one pass that writes; of a long row among the few that
reach a bound which a sample told.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES, KEYS = 64, 128  # of one program's scores: 617 TFLOP/s in bfloat16 on an H200
BLOCK = 4096  # scores that one program of `_select` reads at once
SAMPLE = 4096  # scores of a row that tell a bound
TOGETHER = 4  # neighbours in a sample, which share a sector of memory
ROWS = 4096  # queries whose scores are chosen from at once, at most: each has room for scores and places of its own


@triton.jit
def _scores(
    q,
    w,
    k,
    low,
    high,
    scores,
    first,
    count,
    keys,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BQ: tl.constexpr,
    BK: tl.constexpr,
):
    """Of a block of queries and one of keys; blocks that no query may see are left as they are."""
    rows = first + tl.program_id(0) * BQ + tl.arange(0, BQ)
    inside = rows < first + count
    begin = tl.program_id(1) * BK
    hi = tl.max(tl.load(high + rows, mask=inside, other=0))
    lo = tl.min(tl.load(low + rows, mask=inside, other=2147483647))
    if (begin >= hi) | (begin + BK <= lo):
        return
    columns = begin + tl.arange(0, BK)
    ds = tl.arange(0, D)
    kt = tl.load(k + columns[None, :].to(tl.int64) * D + ds[:, None], mask=(columns < keys)[None, :], other=0.0)
    at = rows.to(tl.int64) * HEADS
    total = tl.zeros([BQ, BK], tl.float32)
    for h in range(HEADS):
        qh = tl.load(q + (at + h)[:, None] * D + ds[None, :], mask=inside[:, None], other=0.0)
        weight = tl.load(w + at + h, mask=inside, other=0.0)
        total += tl.maximum(tl.dot(qh, kt), 0.0) * weight[:, None]
    spot = (rows - first).to(tl.int64)[:, None] * keys + columns[None, :]
    tl.store(scores + spot, total, mask=inside[:, None] & (columns < keys)[None, :])


@triton.jit
def _sortable(x):
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, ~bits, bits | -2147483648).to(tl.uint32, bitcast=True)


@triton.jit
def _unsortable(digits):
    bits = digits.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits & 2147483647, ~bits).to(tl.float32, bitcast=True)


@triton.jit
def _bound(values, begin, end, COUNT, DIGITS: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT-th largest of values[begin:end] by its first digits of BITS bits, as `_sortable` has them (the last may
    have fewer), and how many of those that share these digits are among the COUNT largest.

    5 bits are counted three times as fast as 8, by what is in reach; what has to be fetched again for each has 8.
    """
    steps = tl.arange(0, BLOCK)
    bins = tl.arange(0, 1 << BITS)
    known = tl.zeros([1], tl.uint32)  # the digits found so far
    wanted = tl.zeros([1], tl.int32) + COUNT  # of those that share them
    for digit in range(DIGITS):
        below = tl.maximum(32 - BITS - BITS * digit, 0)
        bits = 32 - BITS * digit - below
        counts = tl.zeros([1 << BITS], tl.int32)
        for start in range(begin, end, BLOCK):
            place = start + steps
            value = _sortable(tl.load(values + place, mask=place < end, other=0.0))
            digits = value >> below
            fits = ((digits >> bits) == known) & (place < end)
            counts += tl.histogram((digits & ((1 << bits) - 1)).to(tl.int32), 1 << BITS, mask=fits)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # of larger digits
        here = (above < wanted) & (above + counts >= wanted)
        found = tl.sum(tl.where(here, bins, 0), 0)
        wanted = wanted - tl.sum(tl.where(here, above, 0), 0)
        known = (known << bits) | found.to(tl.uint32)
    return known, wanted


@triton.jit
def _write_best(values, places, begin, end, out, COUNT: tl.constexpr, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT largest of values[begin:end], and of equal ones the first: places[i] with LISTED, else i itself."""
    if LISTED:
        known, wanted = _bound(values, begin, end, COUNT, 7, 5, BLOCK)
    else:
        known, wanted = _bound(values, begin, end, COUNT, 4, 8, BLOCK)
    steps = tl.arange(0, BLOCK)
    taken = tl.zeros([1], tl.int32)
    equal = tl.zeros([1], tl.int32)
    for start in range(begin, end, BLOCK):
        place = start + steps
        value = _sortable(tl.load(values + place, mask=place < end, other=0.0))
        ties = ((value == known) & (place < end)).to(tl.int32)
        order = equal + tl.cumsum(ties, 0)
        keep = (((value > known) & (place < end)) | ((ties > 0) & (order <= wanted))).to(tl.int32)
        spot = taken + tl.cumsum(keep, 0) - 1
        if LISTED:
            place = tl.load(places + place, mask=place < end, other=0)
        tl.store(out + spot, place, mask=keep > 0)
        taken += tl.sum(keep, 0)
        equal += tl.sum(ties, 0)


@triton.jit
def _select(
    scores, low, high, chosen, kept, places, first, keys,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, TOGETHER: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The COUNT largest of a row between its bounds, in the order of their places; -1 where there are fewer.

    A long row is read once: a sample of its scores tells a bound that more than COUNT reach, by five standard
    deviations of what a sample tells, and what reaches it is copied. Where that is too few, or more than there is room
    for, the whole row is gone over digit by digit.
    """
    row = tl.program_id(0).to(tl.int64)
    lo, hi = tl.load(low + first + row), tl.load(high + first + row)
    at = scores + row * keys
    out = chosen + (first + row) * COUNT
    steps = tl.arange(0, BLOCK)
    if hi - lo <= COUNT:
        for start in range(0, COUNT, BLOCK):
            place = lo + start + steps
            tl.store(out + start + steps, tl.where(place < hi, place, -1), mask=start + steps < COUNT)
        return
    kept += row * ROOM
    places += row * ROOM
    found = tl.zeros([1], tl.int32)
    if hi - lo > 4 * SAMPLE:
        sample = tl.arange(0, SAMPLE)
        group = (sample // TOGETHER).to(tl.float32) * ((hi - lo - TOGETHER).to(tl.float32) / (SAMPLE // TOGETHER))
        tl.store(kept + sample, tl.load(at + lo + group.to(tl.int32) + sample % TOGETHER))
        tl.debug_barrier()
        expected = SAMPLE * (COUNT / (hi - lo).to(tl.float32))
        rank = (expected + 5.0 * tl.sqrt(expected) + 10.0).to(tl.int32)
        digits, _ = _bound(kept, 0, SAMPLE, rank, 3, 5, SAMPLE)
        bound = _unsortable(digits << 17)
        tl.debug_barrier()
        for start in tl.range(lo, hi, BLOCK, num_stages=3):
            place = start + steps
            score = tl.load(at + place, mask=place < hi, other=float("-inf"))
            keep = score >= bound
            ones = keep.to(tl.int32)
            spot = found + tl.cumsum(ones, 0) - 1
            tl.store(kept + spot, score, mask=keep & (spot < ROOM))
            tl.store(places + spot, place, mask=keep & (spot < ROOM))
            found += tl.sum(ones, 0)
        tl.debug_barrier()
    many = tl.max(found, 0)
    if (many >= COUNT) & (many <= ROOM):
        _write_best(kept, places, 0, many, out, COUNT, True, SAMPLE)
    else:
        _write_best(at, places, lo, hi, out, COUNT, False, BLOCK)


def choose(q: Tensor, weights: Tensor, k: Tensor, low: Tensor, high: Tensor, count: int, scores_bytes: int) -> Tensor:
    """As `choice.choose_keys`, with scores of at most so many bytes at a time (of 64 queries at least)."""
    n, heads, dim = q.shape
    q, weights, k = q.contiguous(), weights.contiguous(), k.contiguous()
    chosen = torch.empty(n, count, dtype=torch.int32, device=q.device)
    rows = max(QUERIES, min(n, ROWS, scores_bytes // (4 * len(k))) // QUERIES * QUERIES)
    scores = torch.empty(rows, len(k), device=q.device, dtype=torch.float32)
    room = 4 * max(SAMPLE // 2, triton.next_power_of_2(count))
    kept = torch.empty(rows, room, device=q.device, dtype=torch.float32)
    places = torch.empty(rows, room, device=q.device, dtype=torch.int32)
    for first in range(0, n, rows):
        size = min(rows, n - first)
        _scores[(triton.cdiv(size, QUERIES), triton.cdiv(len(k), KEYS))](
            q, weights, k, low, high, scores, first, size, len(k),
            HEADS=heads, D=dim, BQ=QUERIES, BK=KEYS, num_warps=4, num_stages=3,
        )  # fmt: skip
        _select[(size,)](
            scores, low, high, chosen, kept, places, first, len(k),
            COUNT=count, BLOCK=BLOCK, SAMPLE=SAMPLE, TOGETHER=TOGETHER, ROOM=room, num_warps=4,
        )  # fmt: skip
    return chosen
