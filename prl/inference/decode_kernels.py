# mypy: allow-untyped-defs, allow-untyped-calls
"""Triton kernels of a pass that decodes: new keys and values into the cache, and attention of one token a row to it.

Each row reads its own stretch of the cache and no further, so a pass has the same launches whatever the contexts are:
it can be captured as a CUDA graph. Long contexts of few rows are read in parts by several programs, whose results are
merged by their log-sum-exp (Flash-Decoding; the merge as in arXiv:2112.05682).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # keys that a program reads at once
PROGRAMS = 512  # that keep a GPU busy: fewer rows and heads are read in parts
MOST_PARTS = 32


@triton.jit
def _write_kernel(
    k, v, keys, values, slots, places, slot_stride, head_stride, width, DIM: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    inside = offsets < width
    target = tl.load(slots + row) * slot_stride + tl.load(places + row) * DIM
    target += (offsets // DIM) * head_stride + offsets % DIM
    tl.store(keys + target, tl.load(k + row * width + offsets, mask=inside), mask=inside)
    tl.store(values + target, tl.load(v + row * width + offsets, mask=inside), mask=inside)


@triton.jit
def _attend_kernel(
    q, keys, values, slots, positions, out, lse, slot_stride, head_stride, scale,
    GROUP: tl.constexpr, QUERIES: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    count = tl.load(positions + row).to(tl.int32) + 1
    each = tl.cdiv(tl.cdiv(count, PARTS), BLOCK) * BLOCK
    first = part * each
    last = tl.minimum(first + each, count)
    group, columns = tl.arange(0, QUERIES), tl.arange(0, WIDE)
    heads = (row * tl.num_programs(1) + head) * GROUP + group  # of queries
    in_group, in_head = group < GROUP, columns < DIM
    queries = tl.load(q + heads[:, None] * DIM + columns[None, :], mask=in_group[:, None] & in_head[None, :], other=0.0)
    start_of = tl.load(slots + row) * slot_stride + head * head_stride
    highest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    gathered = tl.zeros([QUERIES, WIDE], tl.float32)
    for begin in range(first, last, BLOCK):
        tokens = begin + tl.arange(0, BLOCK)
        seen = tokens < last
        where = start_of + tokens[:, None] * DIM + columns[None, :]
        mask = seen[:, None] & in_head[None, :]
        block = tl.load(keys + where, mask=mask, other=0.0)
        scores = tl.dot(queries, tl.trans(block), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights, fade = tl.exp(scores - higher[:, None]), tl.exp(highest - higher)
        block = tl.load(values + where, mask=mask, other=0.0)
        gathered = gathered * fade[:, None] + tl.dot(weights.to(block.dtype), block, input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        highest = higher
    result = gathered / tl.where(total > 0, total, 1.0)[:, None]
    heads = heads * PARTS + part
    tl.store(out + heads[:, None] * DIM + columns[None, :], result, mask=in_group[:, None] & in_head[None, :])
    if PARTS > 1:
        tl.store(lse + heads, tl.where(total > 0, highest + tl.log(total), -float("inf")), mask=in_group)


@triton.jit
def _merge_kernel(parts, lse, out, DIM: tl.constexpr, WIDE: tl.constexpr, PARTS: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    part, columns = tl.arange(0, PARTS), tl.arange(0, WIDE)
    inside = columns < DIM
    sums = tl.load(lse + head * PARTS + part)
    weights = tl.exp(sums - tl.max(sums, 0))
    weights = weights / tl.sum(weights, 0)
    results = tl.load(parts + (head * PARTS + part)[:, None] * DIM + columns[None, :], mask=inside[None, :], other=0.0)
    tl.store(out + head * DIM + columns, tl.sum(results * weights[:, None], 0), mask=inside)


def write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor, places: Tensor) -> None:
    """k, v [B, Hkv, D] into keys, values [slots, Hkv, max_len, D], at (slot, place), both [B] int64."""
    rows, heads, dim = k.shape
    k, v = k.contiguous(), v.contiguous()
    block = triton.next_power_of_2(heads * dim)
    with torch.cuda.device(k.device):
        _write_kernel[(rows,)](
            k, v, keys, values, slots, places, keys.stride(0), keys.stride(1), heads * dim, DIM=dim, BLOCK=block
        )  # fmt: skip


def attend(q: Tensor, keys: Tensor, values: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """q [B, Hq, D] of tokens at `positions` [B] int64 of their slots, which see all of these up to themselves; keys and
    values [slots, Hkv, max_len, D] -> [B, Hq, D].
    """
    rows, query_heads, dim = q.shape
    kv_heads = keys.shape[1]
    group, wide = query_heads // kv_heads, max(16, triton.next_power_of_2(dim))
    parts = parts_of(rows * kv_heads)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    of_parts, lse = out, out  # the second of which is not written
    if parts > 1:
        of_parts = torch.empty(rows, query_heads, parts, dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(rows, query_heads, parts, dtype=torch.float32, device=q.device)
    with torch.cuda.device(q.device):
        _attend_kernel[(rows, kv_heads, parts)](
            q.contiguous(), keys, values, slots, positions, of_parts, lse, keys.stride(0), keys.stride(1), dim**-0.5,
            GROUP=group, QUERIES=max(16, triton.next_power_of_2(group)), DIM=dim, WIDE=wide, PARTS=parts, BLOCK=BLOCK,
            num_stages=2,
        )  # fmt: skip
        if parts > 1:
            _merge_kernel[(rows * query_heads,)](of_parts, lse, out, DIM=dim, WIDE=wide, PARTS=parts)
    return out


def parts_of(stretches: int) -> int:
    """Programs that share one head of one row: a power of two."""
    return min(MOST_PARTS, triton.next_power_of_2(triton.cdiv(PROGRAMS, stretches)))
