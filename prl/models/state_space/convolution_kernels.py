# mypy: allow-untyped-defs, allow-untyped-calls
"""The convolution of state-space layers over packed documents on CUDA, in Triton.

Forward reads x where it lies and writes the result; backward makes the sums before the SiLU again. Of weights every
block of tokens makes a share of the gradient, and the shares are added up in order: the same inputs, the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS, CHANNELS = 64, 128  # of a tile
ROUNDS = 8  # tiles of tokens that one program of `_sums_backward` goes through


def forward(x: Tensor, weight: Tensor, bias: Tensor, first: Tensor) -> Tensor:
    """x [N, C] with rows of neighbouring numbers, weight [C, K], bias [C], first [N] int32: where the document of each
    token begins -> [N, C].
    """
    tokens, channels = x.shape
    y = x.new_empty(tokens, channels)
    grid = (triton.cdiv(tokens, TOKENS), triton.cdiv(channels, CHANNELS))
    _convolve[grid](x, weight, bias, first, y, x.stride(0), tokens, channels, weight.shape[1], TOKENS, CHANNELS)
    return y


def backward(dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, weight and bias."""
    (tokens, channels), taps = x.shape, weight.shape[1]
    dsums, dx = torch.empty_like(dy, memory_format=torch.contiguous_format), x.new_empty(tokens, channels)
    columns, programs = triton.cdiv(channels, CHANNELS), triton.cdiv(tokens, TOKENS * ROUNDS)
    shares = x.new_empty(programs, taps + 1, channels, dtype=torch.float32)
    _sums_backward[(programs, columns)](
        dy, x, weight, bias, first, dsums, shares, dy.stride(0), x.stride(0), tokens, channels, taps, TOKENS, CHANNELS,
        ROUNDS, triton.next_power_of_2(taps + 1),
    )  # fmt: skip
    grid = (triton.cdiv(tokens, TOKENS), columns)
    _inputs_backward[grid](dsums, weight, first, dx, tokens, channels, taps, TOKENS, CHANNELS)
    totals = shares.sum(0)
    return dx, totals[:taps].t().to(weight.dtype), totals[taps].to(bias.dtype)


@triton.jit
def _tap(x, w, ts, cs, first, row, channels, K: tl.constexpr, k: tl.constexpr, inside):
    """What tap k sees of each token's document, [T, C], and its weights [C]."""
    source = ts - (K - 1) + k
    there = (source >= first)[:, None] & inside
    seen = tl.load(x + source[:, None].to(tl.int64) * row + cs[None, :], mask=there, other=0.0).to(tl.float32)
    return seen, tl.load(w + cs * K + k, mask=cs < channels, other=0.0).to(tl.float32)


@triton.jit
def _sums(x, w, bias, ts, cs, first, row, channels, K: tl.constexpr, inside):
    total = tl.load(bias + cs, mask=cs < channels, other=0.0).to(tl.float32)[None, :]
    for k in tl.static_range(K):
        seen, weights = _tap(x, w, ts, cs, first, row, channels, K, k, inside)
        total = total + seen * weights[None, :]
    return total


@triton.jit
def _convolve(
    x, w, bias, first, y, row, tokens, channels, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    ts, cs = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * C + tl.arange(0, C)
    inside = (ts < tokens)[:, None] & (cs < channels)[None, :]
    begins = tl.load(first + ts, mask=ts < tokens, other=0)
    total = _sums(x, w, bias, ts, cs, begins, row, channels, K, inside)
    tl.store(y + ts[:, None].to(tl.int64) * channels + cs[None, :], total * tl.sigmoid(total), mask=inside)


@triton.jit
def _sums_backward(
    dy, x, w, bias, first, dsums, shares, dy_row, x_row, tokens, channels, K: tl.constexpr, T: tl.constexpr,
    C: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Of the sums before the SiLU [N, C], and this program's share of the gradients of weights and bias."""
    cs, rows = tl.program_id(1) * C + tl.arange(0, C), tl.arange(0, ROWS)[:, None]
    share = tl.zeros([ROWS, C], tl.float32)  # of tap 0, 1, ..., and of the bias
    for i in range(ROUNDS):
        ts = (tl.program_id(0) * ROUNDS + i) * T + tl.arange(0, T)
        inside = (ts < tokens)[:, None] & (cs < channels)[None, :]
        begins = tl.load(first + ts, mask=ts < tokens, other=0)
        total = _sums(x, w, bias, ts, cs, begins, x_row, channels, K, inside)
        grad = tl.load(dy + ts[:, None].to(tl.int64) * dy_row + cs[None, :], mask=inside, other=0.0).to(tl.float32)
        gate = tl.sigmoid(total)
        grad = grad * gate * (1 + total * (1 - gate))
        tl.store(dsums + ts[:, None].to(tl.int64) * channels + cs[None, :], grad, mask=inside)
        for k in tl.static_range(K):
            seen, _ = _tap(x, w, ts, cs, begins, x_row, channels, K, k, inside)
            share += tl.where(rows == k, tl.sum(grad * seen, 0)[None, :], 0.0)
        share += tl.where(rows == K, tl.sum(grad, 0)[None, :], 0.0)
    place = (tl.program_id(0).to(tl.int64) * (K + 1) + rows) * channels + cs[None, :]
    tl.store(shares + place, share, mask=(rows <= K) & (cs < channels)[None, :])


@triton.jit
def _inputs_backward(
    dsums, w, first, dx, tokens, channels, K: tl.constexpr, T: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """x at s is seen by tap k of the token K - 1 - k further on, if that is of the same document."""
    ts, cs = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1) * C + tl.arange(0, C)
    inside = (ts < tokens)[:, None] & (cs < channels)[None, :]
    total = tl.zeros([T, C], tl.float32)
    for k in tl.static_range(K):
        later = ts + (K - 1) - k
        begins = tl.load(first + later, mask=later < tokens, other=2147483647)
        seen = (begins <= ts)[:, None] & inside
        grad = tl.load(dsums + later[:, None].to(tl.int64) * channels + cs[None, :], mask=seen, other=0.0)
        total += grad.to(tl.float32) * tl.load(w + cs * K + k, mask=cs < channels, other=0.0).to(tl.float32)[None, :]
    tl.store(dx + ts[:, None].to(tl.int64) * channels + cs[None, :], total, mask=inside)
