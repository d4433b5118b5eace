# mypy: allow-untyped-defs, allow-untyped-calls
"""The casts of `fp8_cast` as Triton kernels: each tile of 128x128 values is read once and leaves as e4m3, along rows,
along columns or both.

Memory is to bound them, so the transposed values must not cost more than the plain ones. A tile is held as four
quarters, of rows 0, 4, 8..., of rows 1, 5, 9... and so on: one value of each makes a word of four bytes that are
neighbours in the transposed tile, and words instead of bytes go through shared memory. Tiles of one row follow each
other, so that programs that run together read whole rows. Scales along rows lie with the rows innermost, as the TMA
loads of DeepGEMM want them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from prl.models.fp8.format import BLOCK, E4M3_MAX, SMALLEST, Scaled

assert E4M3_MAX == 448  # `_factor` and `_scale` have it, and what follows from it, as bits
LEAST: tl.constexpr = tl.constexpr(SMALLEST)
TILE: tl.constexpr = tl.constexpr(BLOCK)
QUARTER: tl.constexpr = tl.constexpr(BLOCK // 4)
ALIGNED = 4  # float32 values in the 16 bytes that a TMA stride is a multiple of
WARPS = 4


# --- pieces of kernels ------------------------------------------------------------------------------------------------


@triton.jit
def _column_amax(a, b, c, d):
    largest = tl.maximum(tl.maximum(tl.abs(a), tl.abs(b)), tl.maximum(tl.abs(c), tl.abs(d)))
    return tl.maximum(tl.max(largest, axis=0), LEAST)


@triton.jit
def _assembled(code: tl.constexpr, x):
    """float32 -> float32 by instructions of PTX, one number at a time: $1 -> $0."""
    return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _factor(amax):
    """448 / amax to the last bit, for what is finite: an approximation mended twice, where division has a branch (a
    factor of 2^-20 on both sides keeps the largest from being taken for infinite).
    """
    return _assembled(
        """{ .reg .f32 minus, inverse, error, quotient;
        mul.f32 minus, $1, 0f35800000;
        rcp.approx.ftz.f32 inverse, minus;
        neg.f32 minus, minus;
        fma.rn.f32 error, minus, inverse, 0f3F800000;
        fma.rn.f32 inverse, error, inverse, inverse;
        mul.f32 quotient, inverse, 0f39E00000;
        fma.rn.f32 error, minus, quotient, 0f39E00000;
        fma.rn.f32 $0, error, inverse, quotient; }""",
        amax,
    )


@triton.jit
def _scale(amax):
    """amax / 448 to the last bit, without a division."""
    return _assembled(
        """{ .reg .f32 error, quotient;
        mul.f32 quotient, $1, 0f3B124925;
        fma.rn.f32 error, quotient, 0fC3E00000, $1;
        fma.rn.f32 $0, error, 0f3B124925, quotient; }""",
        amax,
    )


@triton.jit
def _rounded(x):
    """float32 -> bfloat16, two at once: one by one they go through a slower pipe."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)) by two approximations: what SwiGLU's casts made of it on an H200 were the bits of an exact
    division (260M normal numbers, e4m3 and scales).
    """
    return _assembled(
        """{ .reg .f32 e;
        mul.f32 e, $1, 0fBFB8AA3B;
        ex2.approx.ftz.f32 e, e;
        add.f32 e, e, 0f3F800000;
        rcp.approx.ftz.f32 $0, e; }""",
        x,
    )


@triton.jit
def _words(a, b, c, d):
    """e4m3 of four float32 values, the first in the lowest byte."""
    return tl.inline_asm_elementwise(
        """{ .reg .b16 low, high;
        cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
        cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
        mov.b32 $0, {low, high}; }""",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _store_rows(x, values, scales, row, column, width, scales_stride, column_tile, height):
    """x [32, 128] float32, its rows cast one by one; values [height, width]."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), LEAST)
    stored = row < height
    place = row.to(tl.int64)[:, None] * width + column[None, :]
    tl.store(values + place, (x * _factor(amax)[:, None]).to(tl.float8e4nv), mask=stored[:, None])
    tl.store(scales + column_tile.to(tl.int64) * scales_stride + row, _scale(amax), mask=stored)


@triton.jit
def _store_columns(a, b, c, d, words, scales, row_tile, column, width, words_stride):
    """Quarters [32, 128] float32 of a tile, its columns cast one by one; words [width, words_stride] of four values."""
    amax = _column_amax(a, b, c, d)
    factor = _factor(amax)[None, :]
    packed = _words(a * factor, b * factor, c * factor, d * factor)
    row = row_tile * QUARTER + tl.arange(0, QUARTER)
    tl.store(words + column.to(tl.int64)[None, :] * words_stride + row[:, None], packed)
    tl.store(scales + row_tile.to(tl.int64) * width + column, _scale(amax))


@triton.jit
def _load_rows(x, source, row, column, stride, height, GATHER: tl.constexpr):
    """[32, 128] float32; zeros behind `height` and where `source` says that nothing lies there."""
    exists = row < height
    place = row.to(tl.int64)
    if GATHER:
        place = tl.load(source + row, mask=exists, other=-1)
        exists = exists & (place >= 0)
    return tl.load(x + place[:, None] * stride + column[None, :], mask=exists[:, None], other=0.0).to(tl.float32)


# --- activations ------------------------------------------------------------------------------------------------------


# a height of 1 is not to be compiled in: with it, columns came out wrong on an H200 (Triton 3.6; cause unknown)
@triton.jit(do_not_specialize=["height"])
def _cast_tiles(
    x, row_values, row_scales, column_words, column_scales, source,
    height, x_stride, width, row_scales_stride, words_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GATHER: tl.constexpr,
):  # fmt: skip
    column_tile, row_tile = tl.program_id(0), tl.program_id(1)
    column = column_tile * TILE + tl.arange(0, TILE)
    row = row_tile * TILE + tl.arange(0, QUARTER) * 4
    a = _load_rows(x, source, row, column, x_stride, height, GATHER)
    b = _load_rows(x, source, row + 1, column, x_stride, height, GATHER)
    c = _load_rows(x, source, row + 2, column, x_stride, height, GATHER)
    d = _load_rows(x, source, row + 3, column, x_stride, height, GATHER)
    if ROWS:
        _store_rows(a, row_values, row_scales, row, column, width, row_scales_stride, column_tile, height)
        _store_rows(b, row_values, row_scales, row + 1, column, width, row_scales_stride, column_tile, height)
        _store_rows(c, row_values, row_scales, row + 2, column, width, row_scales_stride, column_tile, height)
        _store_rows(d, row_values, row_scales, row + 3, column, width, row_scales_stride, column_tile, height)
    if COLUMNS:
        _store_columns(a, b, c, d, column_words, column_scales, row_tile, column, width, words_stride)


class Buffers:
    """Where the casts of an activation [height, width] go, whole or part by part."""

    def __init__(self, like: Tensor, height: int, width: int, rows: bool, columns: bool) -> None:
        self.height, self.width, self.rows, self.columns = height, width, rows, columns
        self.whole = -(-height // BLOCK) * BLOCK
        stride = -(-height // ALIGNED) * ALIGNED
        e4m3, float32 = torch.float8_e4m3fn, torch.float32
        self.row_values = like.new_empty((height, width) if rows else (0, BLOCK), dtype=e4m3)
        self.row_scales = like.new_empty((width // BLOCK, stride) if rows else (0, 0), dtype=float32)
        self.column_values = like.new_empty((width, self.whole) if columns else (0, BLOCK), dtype=e4m3)
        self.column_scales = like.new_empty((self.whole // BLOCK, width) if columns else (0, 0), dtype=float32)

    def part(self, offset: int) -> tuple[Tensor, ...]:
        """What kernels write to, from column `offset` on; transposed values as words of four."""
        if offset == 0:
            return self.row_values, self.row_scales, self.column_values.view(torch.int32), self.column_scales
        return (
            self.row_values[:, offset:],
            self.row_scales[offset // BLOCK :],
            self.column_values[offset:].view(torch.int32),
            self.column_scales[:, offset:],
        )

    def results(self) -> tuple[Scaled, Scaled]:
        rows = Scaled(self.row_values, self.row_scales[:, : self.height].t())
        return rows, Scaled(self.column_values, self.column_scales.t())


def cast_tiles(
    parts: Sequence[Tensor], rows: bool, columns: bool, source: Tensor | None = None
) -> tuple[Scaled, Scaled]:
    """`cast_rows` and `cast_columns` of bfloat16 parts [M, K] side by side; of the one not wanted, an empty one.

    source [Mp] int64: the rows to take, -1 for zeros.
    """
    height = parts[0].shape[0] if source is None else source.shape[0]
    buffers = Buffers(parts[0], height, sum(part.shape[1] for part in parts), rows, columns)
    offset = 0
    for part in parts:
        x = part if part.stride(1) == 1 else part.contiguous()
        if height:
            _cast_tiles[(x.shape[1] // BLOCK, buffers.whole // BLOCK)](
                x, *buffers.part(offset), x if source is None else source,
                height, x.stride(0), buffers.width, buffers.row_scales.stride(0), buffers.whole // 4,
                rows, columns, source is not None, num_warps=WARPS,
            )  # fmt: skip
        offset += part.shape[1]
    return buffers.results()


# --- weights ----------------------------------------------------------------------------------------------------------


@triton.jit
def _store_block(x, factor, values, row, column, width):
    tl.store(values + row[:, None] * width + column[None, :], (x * factor).to(tl.float8e4nv))


@triton.jit
def _cast_blocks(
    weight, values, scales, n, k, words_stride, scales_stride, values_batch, scales_batch, TRANSPOSED: tl.constexpr
):
    column_block, row_block, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = row_block * TILE + tl.arange(0, QUARTER) * 4
    column = column_block * TILE + tl.arange(0, TILE)
    first = weight + matrix * n * k
    a = _load_rows(first, first, row, column, k, n, False).to(tl.bfloat16).to(tl.float32)
    b = _load_rows(first, first, row + 1, column, k, n, False).to(tl.bfloat16).to(tl.float32)
    c = _load_rows(first, first, row + 2, column, k, n, False).to(tl.bfloat16).to(tl.float32)
    d = _load_rows(first, first, row + 3, column, k, n, False).to(tl.bfloat16).to(tl.float32)
    amax = tl.max(_column_amax(a, b, c, d), axis=0)
    factor = _factor(amax)
    values += matrix * values_batch
    scales += matrix * scales_batch
    if TRANSPOSED:
        word = row_block * QUARTER + tl.arange(0, QUARTER)
        tl.store(
            values + column.to(tl.int64)[None, :] * words_stride + word[:, None],
            _words(a * factor, b * factor, c * factor, d * factor),
        )
        tl.store(scales + column_block * scales_stride + row_block, _scale(amax))
    else:
        _store_block(a, factor, values, row, column, k)
        _store_block(b, factor, values, row + 1, column, k)
        _store_block(c, factor, values, row + 2, column, k)
        _store_block(d, factor, values, row + 3, column, k)
        tl.store(scales + row_block * scales_stride + column_block, _scale(amax))


def cast_weights(parts: Sequence[Tensor], transposed: bool) -> Scaled:
    """`cast_blocks` of parts [..., N, K], rounded to bfloat16, one below the other; N and K multiples of 128."""
    *batch, _, k = parts[0].shape
    height = sum(part.shape[-2] for part in parts)
    shape = (*batch, k, height) if transposed else (*batch, height, k)
    values = parts[0].new_empty(shape, dtype=torch.float8_e4m3fn)
    scales = parts[0].new_empty((*batch, shape[-2] // BLOCK, shape[-1] // BLOCK), dtype=torch.float32)
    out = values.view(torch.int32) if transposed else values
    unit, offset = (4, 0) if transposed else (1, 0)
    for part in parts:
        n, block = part.shape[-2], offset // BLOCK
        target = (out[..., offset // 4 :], scales[..., block:]) if transposed else (
            out[..., offset:, :], scales[..., block:, :]
        )  # fmt: skip
        _cast_blocks[(k // BLOCK, n // BLOCK, part.numel() // (n * k))](
            part.contiguous(), *target, n, k, height // 4, scales.stride(-2),
            height * k // unit, height * k // BLOCK**2, transposed, num_warps=WARPS,
        )  # fmt: skip
        offset += n
    return Scaled(values, scales)
