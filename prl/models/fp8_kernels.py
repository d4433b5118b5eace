# mypy: allow-untyped-defs, allow-untyped-calls
"""The casts of `fp8_cast` as Triton kernels: each tile of 128x128 values is read once and leaves as e4m3.

Scales along rows are laid out with the rows innermost, as the TMA loads of DeepGEMM want them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl.models.fp8_cast import BLOCK, E4M3_MAX, SMALLEST, Scaled
from prl.models.fp8_groups import GroupedRows

LARGEST: tl.constexpr = tl.constexpr(E4M3_MAX)
LEAST: tl.constexpr = tl.constexpr(SMALLEST)
TILE: tl.constexpr = tl.constexpr(BLOCK)
ALIGNED = 4  # float32 values in the 16 bytes that a TMA stride is a multiple of


def cast_tiles(
    x: Tensor, rows: bool, columns: bool, groups: GroupedRows | None = None, padded: bool = False
) -> tuple[Scaled, Scaled]:
    """`cast_rows` and `cast_columns` of x [M, K] bfloat16; of the one not wanted, an empty one.

    With `groups`, of the rows in their padded order: values [Mp, K]; columns as one flat buffer of a [K, rows] matrix
    per group, with scales [K, Mp / 128]. `padded`: x is in that order already.
    """
    m, k = x.shape
    height = groups.padded if groups is not None else m
    whole = -(-height // BLOCK) * BLOCK
    stride = -(-height // ALIGNED) * ALIGNED
    row_values = x.new_empty((height, k) if rows else 0, dtype=torch.float8_e4m3fn)
    row_scales = x.new_empty((k // BLOCK, stride) if rows else 0, dtype=torch.float32)
    shape = (0,) if not columns else (k, whole) if groups is None else (k * whole,)
    column_values = x.new_empty(shape, dtype=torch.float8_e4m3fn)
    column_scales = x.new_empty((whole // BLOCK, k) if columns else 0, dtype=torch.float32)
    if height:
        _cast_tiles[(whole // BLOCK, k // BLOCK)](
            x, row_values, row_scales, column_values, column_scales,
            x if groups is None else groups.source,
            x if groups is None else groups.tile_start,
            x if groups is None else groups.tile_rows,
            height, k, x.stride(0), stride, whole,
            rows, columns, groups is not None, groups is not None and not padded,
            num_warps=8,
        )  # fmt: skip
    by_row = Scaled(row_values, row_scales[:, :height].t() if rows else row_scales)
    return by_row, Scaled(column_values, column_scales.t() if columns else column_scales)


@triton.jit
def _cast_tiles(
    x_ptr, row_values_ptr, row_scales_ptr, column_values_ptr, column_scales_ptr,
    source_ptr, tile_start_ptr, tile_rows_ptr,
    height, k, x_stride, row_scales_stride, whole,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUPED: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    row = tile * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    exists = row < height
    source = row.to(tl.int64)
    if GATHER:
        source = tl.load(source_ptr + row, mask=exists, other=-1).to(tl.int64)
        exists = exists & (source >= 0)
    x = tl.load(x_ptr + source[:, None] * x_stride + column[None, :], mask=exists[:, None], other=0.0).to(tl.float32)
    if ROWS:
        amax = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST)
        values = (x * tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)[:, None]).to(tl.float8e4nv)
        stored = row < height
        tl.store(row_values_ptr + row.to(tl.int64)[:, None] * k + column[None, :], values, mask=stored[:, None])
        scales = tl.div_rn(amax, tl.zeros_like(amax) + LARGEST)
        tl.store(row_scales_ptr + tl.program_id(1).to(tl.int64) * row_scales_stride + row, scales, mask=stored)
    if COLUMNS:
        start = tl.zeros([], tl.int64)
        length = tl.zeros([], tl.int64) + whole
        if GROUPED:
            start = tl.multiple_of(tl.load(tile_start_ptr + tile).to(tl.int64), TILE)
            length = tl.multiple_of(tl.load(tile_rows_ptr + tile).to(tl.int64), TILE)
        amax = tl.maximum(tl.max(tl.abs(x), axis=0), LEAST)
        values = (x * tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)[None, :]).to(tl.float8e4nv)
        place = start * k + column.to(tl.int64)[None, :] * length + (row.to(tl.int64) - start)[:, None]
        tl.store(column_values_ptr + place, values, mask=(length > 0) & (row[:, None] >= 0))
        scales = tl.div_rn(amax, tl.zeros_like(amax) + LARGEST)
        tl.store(column_scales_ptr + tile.to(tl.int64) * k + column, scales)


def cast_weight(weight: Tensor, transposed: bool) -> Scaled:
    """`cast_blocks` of weight [..., N, K] bfloat16, contiguous, N and K multiples of 128."""
    *batch, n, k = weight.shape
    count = weight.numel() // (n * k)
    shape = (*batch, k, n) if transposed else weight.shape
    values = weight.new_empty(shape, dtype=torch.float8_e4m3fn)
    scales = weight.new_empty((*batch, *(size // BLOCK for size in shape[-2:])), dtype=torch.float32)
    grid = (n // BLOCK, k // BLOCK, count)
    _cast_blocks[grid](weight.contiguous(), values, scales, n, k, transposed, num_warps=8)
    return Scaled(values, scales)


@triton.jit
def _cast_blocks(weight_ptr, values_ptr, scales_ptr, n, k, TRANSPOSED: tl.constexpr):
    row_block, column_block, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = row_block * TILE + tl.arange(0, TILE)
    column = column_block * TILE + tl.arange(0, TILE)
    first = matrix * n * k
    x = tl.load(weight_ptr + first + row[:, None] * k + column[None, :]).to(tl.float32)
    amax = tl.maximum(tl.max(tl.max(tl.abs(x), axis=1), axis=0), LEAST)
    values = (x * tl.div_rn(tl.zeros_like(amax) + LARGEST, amax)).to(tl.float8e4nv)
    scale = tl.div_rn(amax, tl.zeros_like(amax) + LARGEST)
    blocks = (n // TILE) * (k // TILE)
    if TRANSPOSED:
        tl.store(values_ptr + first + column[None, :] * n + row[:, None], values)
        tl.store(scales_ptr + matrix * blocks + column_block * (n // TILE) + row_block, scale)
    else:
        tl.store(values_ptr + first + row[:, None] * k + column[None, :], values)
        tl.store(scales_ptr + matrix * blocks + row_block * (k // TILE) + column_block, scale)
