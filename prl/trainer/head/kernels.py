# mypy: allow-untyped-defs, allow-untyped-calls
"""Triton kernels of the chunked LM head: one pass over a chunk's logits forward, one in place backward.

Everything per row of logits [M, V] (any float dtype; arithmetic in float32), with z = logits / temperature:

    forward   lse = log sum exp z,  mean = sum p z,  logp = z[target] - lse,  entropy = lse - mean
    backward  dlogits = (g_logp * (onehot - p) - g_entropy * p * (z - mean)) / temperature,  written over the logits
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # vocabulary entries per step of a row's loop


@triton.jit
def _statistics_kernel(logits, targets, logp, lse_out, mean_out, vocab, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    top = -float("inf")  # running maximum of z, and the sums relative to it
    total = 0.0
    weighted = 0.0
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=-float("inf")).to(tl.float32) * scale
        new_top = tl.maximum(top, tl.max(z, 0))
        shrink = tl.exp(top - new_top)
        # never above 0 but for rounding: the compiler fuses scaling and difference, and what is rounded off -1e20, the
        # number that stands for a token that could not be drawn, is larger than exp can take
        below = z - new_top
        e = tl.exp(tl.where(below > 0, 0.0, below))
        total = total * shrink + tl.sum(e, 0)
        weighted = weighted * shrink + tl.sum(tl.where(inside, e * z, 0.0), 0)
        top = new_top
    lse = top + tl.log(total)
    chosen = tl.load(start + tl.load(targets + row)).to(tl.float32) * scale
    tl.store(logp + row, chosen - lse)
    tl.store(lse_out + row, lse)
    tl.store(mean_out + row, weighted / total)


@triton.jit
def _gradient_kernel(logits, targets, lse_in, mean_in, g_logp, g_entropy, vocab, stride, scale, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    target = tl.load(targets + row)
    lse = tl.load(lse_in + row)
    mean = tl.load(mean_in + row)
    by_logp = tl.load(g_logp + row)
    by_entropy = tl.load(g_entropy + row)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        z = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32) * scale
        p = tl.exp(z - lse)
        onehot = tl.where(columns == target, 1.0, 0.0)
        grad = (by_logp * (onehot - p) - by_entropy * p * (z - mean)) * scale
        tl.store(start + columns, grad, mask=inside)


def row_statistics(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [M, V] (rows contiguous), targets [M] int64 -> logp, lse and mean [M] float32."""
    rows = len(targets)
    logp, lse, mean = (torch.empty(rows, device=logits.device, dtype=torch.float32) for _ in range(3))
    if rows:
        _statistics_kernel[(rows,)](
            logits, targets, logp, lse, mean, logits.shape[1], logits.stride(0), scale, BLOCK=BLOCK, num_warps=8
        )
    return logp, lse, mean


def write_gradient(
    logits: Tensor, targets: Tensor, lse: Tensor, mean: Tensor, g_logp: Tensor, g_entropy: Tensor, scale: float
) -> Tensor:
    """Overwrite logits [M, V] by their gradient."""
    if len(targets):
        _gradient_kernel[(len(targets),)](
            logits, targets, lse, mean, g_logp, g_entropy, logits.shape[1], logits.stride(0), scale,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
    return logits
