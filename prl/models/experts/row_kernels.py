# mypy: allow-untyped-defs, allow-untyped-calls
"""Triton kernels that move rows between tokens and their assignments to experts, each row read and written once.

positions [N, K] int64 says where in rows [M, H] token n's assignments lie, -1: nowhere; every row belongs to one
assignment. `gather_sum` adds up in float32, in the order of the assignments, so it is deterministic.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of a row that one program moves
SCALARS = 1024  # of one program


@triton.jit
def _scatter_kernel(x, rows, positions, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    values = tl.load(x + token * width + columns, mask=inside)
    for k in tl.static_range(TOP_K):
        position = tl.load(positions + token * TOP_K + k)
        tl.store(rows + position * width + columns, values, mask=inside & (position >= 0))


@triton.jit
def _gather_sum_kernel(rows, out, positions, width, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        position = tl.load(positions + token * TOP_K + k)
        values = tl.load(rows + position * width + columns, mask=inside & (position >= 0), other=0.0)
        total += values.to(tl.float32)
    tl.store(out + token * width + columns, total, mask=inside)


@triton.jit
def _segment_sum_kernel(rows, out, order, begins, width, BLOCK: tl.constexpr):
    segment = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for i in range(tl.load(begins + segment), tl.load(begins + segment + 1)):
        row = tl.load(order + i)
        total += tl.load(rows + row * width + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + segment * width + columns, total, mask=inside)


@triton.jit
def _scatter_scalars_kernel(values, out, positions, count, top_k, stride, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + index, mask=index < count, other=-1)
    row = (index // top_k).to(tl.int64)
    value = tl.load(values + row * stride + index % top_k, mask=index < count)
    tl.store(out + position, value, mask=position >= 0)


@triton.jit
def _gather_scalars_kernel(values, out, positions, count, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + index, mask=index < count, other=-1)
    tl.store(out + index, tl.load(values + position, mask=position >= 0, other=0.0), mask=index < count)


def scatter_scalars(values: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """values [N, K] -> [num_rows]: at positions[n, k] is values[n, k], elsewhere 0."""
    values = values if values.stride(-1) == 1 else values.contiguous()
    out = values.new_zeros(num_rows)
    count = positions.numel()
    if count:
        with torch.cuda.device(values.device):
            _scatter_scalars_kernel[(triton.cdiv(count, SCALARS),)](
                values, out, positions, count, positions.shape[1], values.stride(0), BLOCK=SCALARS
            )
    return out


def gather_scalars(values: Tensor, positions: Tensor) -> Tensor:
    """values [M] -> [N, K]: values[positions], 0 where that is nowhere."""
    out = values.new_empty(positions.shape)
    if out.numel():
        with torch.cuda.device(values.device):
            _gather_scalars_kernel[(triton.cdiv(out.numel(), SCALARS),)](
                values.contiguous(), out, positions, out.numel(), BLOCK=SCALARS
            )
    return out


def scatter(x: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    """x [N, H] -> rows [num_rows, H]: row positions[n, k] is x[n]."""
    rows = x.new_empty(num_rows, x.shape[1])
    if num_rows and len(x):
        _launch(_scatter_kernel, x.contiguous(), rows, positions)
    return rows


def gather_sum(rows: Tensor, positions: Tensor) -> Tensor:
    """rows [M, H] -> [N, H]: the sum of rows[positions[n]]."""
    out = rows.new_empty(positions.shape[0], rows.shape[1])
    if out.numel():
        _launch(_gather_sum_kernel, rows.contiguous(), out, positions)
    return out


def segment_sum(rows: Tensor, order: Tensor, begins: Tensor) -> Tensor:
    """rows [M, H], order [M] and begins [N + 1] int64 -> [N, H]: of the rows order[begins[n] : begins[n + 1]] the sum,
    in float32 and in this order.
    """
    segments, width = len(begins) - 1, rows.shape[1]
    out = rows.new_empty(segments, width)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        with torch.cuda.device(rows.device):
            grid = (segments, triton.cdiv(width, block))
            _segment_sum_kernel[grid](rows.contiguous(), out, order, begins, width, BLOCK=block)
    return out


def _launch(kernel, source: Tensor, target: Tensor, positions: Tensor) -> None:
    tokens, top_k = positions.shape
    width = source.shape[1]
    block = min(BLOCK, triton.next_power_of_2(width))
    grid = (tokens, triton.cdiv(width, block))
    with torch.cuda.device(source.device):
        kernel[grid](source, target, positions.contiguous(), width, TOP_K=top_k, BLOCK=block)
