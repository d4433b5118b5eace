# mypy: allow-untyped-defs, allow-untyped-calls
"""The choice of keys on CUDA, in Triton: scores of a block of queries in float32, then the best of every row by their
digits, from the highest: four histograms, and one pass that writes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

QUERIES, KEYS = 64, 128  # of one program's scores: 617 TFLOP/s in bfloat16 on an H200
BLOCK = 4096  # scores that one program of `_select` reads at once


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
def _select(scores, low, high, chosen, first, keys, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The COUNT largest of a row between its bounds, in the order of their places; -1 where there are fewer."""
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
    bins = tl.arange(0, 256)
    known = tl.zeros([1], tl.uint32)  # the digits found so far
    wanted = tl.full([1], COUNT, tl.int32)  # of those that share them
    for digit in tl.static_range(4):
        counts = tl.zeros([256], tl.int32)
        for start in range(lo, hi, BLOCK):
            place = start + steps
            value = _sortable(tl.load(at + place, mask=place < hi, other=0.0))
            fits = place < hi
            if digit > 0:
                fits = fits & ((value >> (32 - 8 * digit)) == known)
            counts += tl.histogram(((value >> (24 - 8 * digit)) & 255).to(tl.int32), 256, mask=fits)
        above = tl.sum(counts, 0) - tl.cumsum(counts, 0)  # of larger digits
        here = (above < wanted) & (above + counts >= wanted)
        found = tl.sum(tl.where(here, bins, 0), 0)
        wanted = wanted - tl.sum(tl.where(here, above, 0), 0)
        known = (known << 8) | found.to(tl.uint32)
    # all above the bound, and of those at it the first `wanted`
    taken = tl.zeros([1], tl.int32)
    equal = tl.zeros([1], tl.int32)
    for start in range(lo, hi, BLOCK):
        place = start + steps
        value = _sortable(tl.load(at + place, mask=place < hi, other=0.0))
        ties = ((value == known) & (place < hi)).to(tl.int32)
        order = equal + tl.cumsum(ties, 0)
        keep = (((value > known) & (place < hi)) | ((ties > 0) & (order <= wanted))).to(tl.int32)
        spot = taken + tl.cumsum(keep, 0) - 1
        tl.store(out + spot, place, mask=keep > 0)
        taken += tl.sum(keep, 0)
        equal += tl.sum(ties, 0)


def choose(q: Tensor, weights: Tensor, k: Tensor, low: Tensor, high: Tensor, count: int, scores_bytes: int) -> Tensor:
    """As `choice.choose_keys`, with scores of at most so many bytes at a time (of 64 queries at least)."""
    n, heads, dim = q.shape
    q, weights, k = q.contiguous(), weights.contiguous(), k.contiguous()
    chosen = torch.empty(n, count, dtype=torch.int32, device=q.device)
    rows = max(QUERIES, min(n, scores_bytes // (4 * len(k))) // QUERIES * QUERIES)
    scores = torch.empty(rows, len(k), device=q.device, dtype=torch.float32)
    for first in range(0, n, rows):
        size = min(rows, n - first)
        _scores[(triton.cdiv(size, QUERIES), triton.cdiv(len(k), KEYS))](
            q, weights, k, low, high, scores, first, size, len(k),
            HEADS=heads, D=dim, BQ=QUERIES, BK=KEYS, num_warps=4, num_stages=3,
        )  # fmt: skip
        _select[(size,)](scores, low, high, chosen, first, len(k), COUNT=count, BLOCK=BLOCK, num_warps=8)
    return chosen
