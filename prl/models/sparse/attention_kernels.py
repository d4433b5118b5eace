# mypy: allow-untyped-defs, allow-untyped-calls
"""Sparse attention on CUDA, in Triton: one program a query and 64 heads.

Forward gathers a block of chosen rows and goes on as FlashAttention does. Backward is two kernels over blocks of
queries: the first makes dq and writes the probabilities and the gradients of scores; the second turns these into the
gradients of rows, some columns at a time, and adds them up atomically in float32. One kernel for both would hold dq and
the rows' gradients, 64 x 576 numbers each, in registers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 64  # of one program
KEYS = 64  # of one step of a program
QUERIES_BYTES = 1 << 30  # of the probabilities and gradients of scores that one block of queries has


@triton.jit
def _forward(
    q, latents, chosen, out, lse, count, scale,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    cs, rs, ks = tl.arange(0, C), tl.arange(0, R), tl.arange(0, BK)
    W: tl.constexpr = C + R
    inside = (heads < H)[:, None]
    at = (n * H + heads)[:, None]
    qc = tl.load(q + at * W + cs[None, :], mask=inside, other=0.0)
    qr = tl.load(q + at * W + C + rs[None, :], mask=inside, other=0.0)
    top = tl.full([BH], float("-inf"), tl.float32)
    total = tl.zeros([BH], tl.float32)
    acc = tl.zeros([BH, C], tl.float32)
    for start in range(0, count, BK):
        index = tl.load(chosen + n * count + start + ks, mask=start + ks < count, other=-1)
        row = tl.where(index < 0, 0, index).to(tl.int64)[:, None] * W
        kc = tl.load(latents + row + cs[None, :])
        kr = tl.load(latents + row + C + rs[None, :])
        s = tl.dot(qr, kr.T, tl.dot(qc, kc.T)) * (scale * 1.4426950408889634)
        s = tl.where((index >= 0)[None, :], s, float("-inf"))
        new = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - safe[:, None])
        alpha = tl.exp2(top - safe)
        total = total * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(kc.dtype), kc, acc * alpha[:, None])
        top = new
    tl.store(out + at * C + cs[None, :], (acc / total[:, None]).to(out.dtype.element_ty), mask=inside)
    tl.store(lse + n * H + heads, (top + tl.log2(total)) / 1.4426950408889634, mask=heads < H)


@triton.jit
def _scores(
    q, latents, chosen, dout, out, lse, dq, probs, dscores, first, count, scale,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dq, and the probabilities and gradients of scores [queries of the block, H, count]."""
    local = tl.program_id(0).to(tl.int64)
    n = first + local
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    cs, rs, ks = tl.arange(0, C), tl.arange(0, R), tl.arange(0, BK)
    W: tl.constexpr = C + R
    inside = (heads < H)[:, None]
    at = (n * H + heads)[:, None]
    qc = tl.load(q + at * W + cs[None, :], mask=inside, other=0.0)
    qr = tl.load(q + at * W + C + rs[None, :], mask=inside, other=0.0)
    do = tl.load(dout + at * C + cs[None, :], mask=inside, other=0.0)
    norm = tl.load(lse + n * H + heads, mask=heads < H, other=0.0) * 1.4426950408889634
    share = tl.sum(do.to(tl.float32) * tl.load(out + at * C + cs[None, :], mask=inside, other=0.0).to(tl.float32), 1)
    dqc = tl.zeros([BH, C], tl.float32)
    dqr = tl.zeros([BH, R], tl.float32)
    for start in range(0, count, BK):
        index = tl.load(chosen + n * count + start + ks, mask=start + ks < count, other=-1)
        row = tl.where(index < 0, 0, index).to(tl.int64)[:, None] * W
        kc = tl.load(latents + row + cs[None, :])
        kr = tl.load(latents + row + C + rs[None, :])
        s = tl.dot(qr, kr.T, tl.dot(qc, kc.T)) * (scale * 1.4426950408889634)
        p = tl.where((index >= 0)[None, :], tl.exp2(s - norm[:, None]), 0.0)
        ds = (p * (tl.dot(do, kc.T) - share[:, None]) * scale).to(kc.dtype)
        dqc = tl.dot(ds, kc, dqc)
        dqr = tl.dot(ds, kr, dqr)
        spot = (local * H + heads)[:, None] * count + start + ks[None, :]
        written = inside & (start + ks < count)[None, :]
        tl.store(probs + spot, p.to(kc.dtype), mask=written)
        tl.store(dscores + spot, ds, mask=written)
    tl.store(dq + at * W + cs[None, :], dqc.to(dq.dtype.element_ty), mask=inside)
    tl.store(dq + at * W + C + rs[None, :], dqr.to(dq.dtype.element_ty), mask=inside)


@triton.jit
def _rows(
    q, dout, chosen, probs, dscores, dlatents, first, count,
    H: tl.constexpr, BH: tl.constexpr, C: tl.constexpr, R: tl.constexpr,
    BC: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EXACTLY: tl.constexpr,
):  # fmt: skip
    """The gradients of rows, BC columns of them: added up, or with EXACTLY each at a place of its own."""
    local = tl.program_id(0).to(tl.int64)
    n = first + local
    W: tl.constexpr = C + R
    hs, ks = tl.arange(0, BH), tl.arange(0, BK)
    cs = tl.program_id(1) * BC + tl.arange(0, BC)
    begin = tl.program_id(2) * GROUP
    for start in range(begin, begin + GROUP, BK):
        listed = start + ks < count
        index = tl.load(chosen + n * count + start + ks, mask=listed, other=-1)
        g = tl.zeros([BK, BC], tl.float32)
        for head in tl.static_range(0, H, BH):
            inside = (head + hs < H)[:, None]
            at = (n * H + head + hs)[:, None]
            qs = tl.load(q + at * W + cs[None, :], mask=inside & (cs < W)[None, :], other=0.0)
            do = tl.load(dout + at * C + cs[None, :], mask=inside & (cs < C)[None, :], other=0.0)
            spot = (local * H + head + hs)[:, None] * count + start + ks[None, :]
            ds = tl.load(dscores + spot, mask=inside & listed[None, :], other=0.0)
            p = tl.load(probs + spot, mask=inside & listed[None, :], other=0.0)
            g = tl.dot(p.T, do, tl.dot(ds.T, qs, g))
        if EXACTLY:
            place = (local * count + start + ks)[:, None] * W
            tl.store(dlatents + place + cs[None, :], g, mask=listed[:, None] & (cs < W)[None, :])
        else:
            place = tl.where(index < 0, 0, index).to(tl.int64)[:, None] * W
            tl.atomic_add(
                dlatents + place + cs[None, :], g, mask=(index >= 0)[:, None] & (cs < W)[None, :], sem="relaxed"
            )


def forward(q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> tuple[Tensor, Tensor]:
    n, heads, width = q.shape
    out = q.new_empty(n, heads, values)
    lse = torch.empty(n, heads, device=q.device, dtype=torch.float32)
    block = min(HEADS, max(16, triton.next_power_of_2(heads)))
    _forward[(n, triton.cdiv(heads, block))](
        q, latents, chosen, out, lse, chosen.shape[1], scale,
        H=heads, BH=block, C=values, R=width - values, BK=KEYS, num_warps=8, num_stages=2,
    )  # fmt: skip
    return out, lse


def backward(
    dout: Tensor, q: Tensor, latents: Tensor, chosen: Tensor, out: Tensor, lse: Tensor, scale: float, exactly: bool
) -> tuple[Tensor, Tensor]:
    """exactly: sums of rows in a fixed order, for which the gradients of a block of queries are kept apart."""
    n, heads, width = q.shape
    values, count = out.shape[2], chosen.shape[1]
    dq = torch.empty_like(q)
    dlatents = torch.zeros(latents.shape, device=q.device, dtype=torch.float32)
    each = 2 * heads * count * q.element_size() + (4 * count * width if exactly else 0)
    size = max(1, min(n, QUERIES_BYTES // each))
    probs, dscores = (q.new_empty(size, heads, count) for _ in range(2))
    apart = torch.empty(size * count, width, device=q.device) if exactly else dlatents
    block = min(HEADS, max(16, triton.next_power_of_2(heads)))
    group = triton.cdiv(triton.cdiv(count, 2), 128) * 128
    for first in range(0, n, size):
        queries = min(size, n - first)
        _scores[(queries, triton.cdiv(heads, block))](
            q, latents, chosen, dout, out, lse, dq, probs, dscores, first, count, scale,
            H=heads, BH=block, C=values, R=width - values, BK=KEYS, num_warps=8, num_stages=1,
        )  # fmt: skip
        _rows[(queries, triton.cdiv(width, 128), triton.cdiv(count, group))](
            q, dout, chosen, probs, dscores, apart, first, count,
            H=heads, BH=block, C=values, R=width - values, BC=128, BK=128, GROUP=group, EXACTLY=exactly,
            num_warps=4, num_stages=1,
        )  # fmt: skip
        if exactly:
            rows = chosen[first : first + queries].flatten()
            dlatents.index_add_(0, rows.clamp(min=0), apart[: len(rows)])  # of -1 nothing but zeros
    return dq, dlatents
