# mypy: allow-untyped-defs, allow-untyped-calls
"""Triton kernels of FP8 experts: how rows lie, SwiGLU fused with the casts of what the next GEMMs read, and the weight
gradients of all experts in one launch.

Every expert's rows begin at a multiple of 128 (`groups.py`); rows behind the last group hold anything, and nobody reads
what comes of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prl.models.fp8.format import BLOCK, Scaled
from prl.models.fp8.groups import GroupedRows
from prl.models.fp8.kernels import QUARTER, TILE, Buffers, _rounded, _sigmoid, _store_columns, _store_rows

# The product's tile: small, so that three of them lie on a multiprocessor and one multiplies while another one scales
SIDE_M, SIDE_N, STAGES = 64, 128, 3
SWIGLU_WARPS = 8


# --- groups -----------------------------------------------------------------------------------------------------------


@triton.jit
def _lay_out(counts, source, expert, sizes, starts, groups, TILE: tl.constexpr, WIDTH: tl.constexpr):
    group, lane = tl.arange(0, WIDTH), tl.arange(0, TILE)
    count = tl.load(counts + group, mask=group < groups, other=0).to(tl.int32)
    size = (count + TILE - 1) // TILE * TILE
    end = tl.cumsum(size, 0)
    begin = tl.program_id(0) * TILE
    mine = (end - size <= begin) & (begin < end)  # the one group whose tile this is, or none
    used = begin + lane < tl.sum(tl.where(mine, end - size + count, 0))
    row = begin.to(tl.int64) + lane
    tl.store(source + row, tl.where(used, row, -1))
    tl.store(expert + row, tl.sum(tl.where(mine, group + 1, 0)) - 1 + tl.zeros([TILE], tl.int32))
    if tl.program_id(0) == 0:
        tl.store(sizes + group, size, mask=group < groups)
        tl.store(starts + group, end - size, mask=group < groups)


def lay_out_groups(counts: Tensor, num_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The fields of `GroupedRows`, of counts [E] int64."""
    groups, device = len(counts), counts.device
    source = torch.empty(num_rows, dtype=torch.int64, device=device)
    expert = torch.empty(num_rows, dtype=torch.int32, device=device)
    sizes, starts = torch.zeros(2, groups, dtype=torch.int32, device=device)
    if num_rows:
        width = triton.next_power_of_2(groups)
        _lay_out[(num_rows // BLOCK,)](counts, source, expert, sizes, starts, groups, TILE=BLOCK, WIDTH=width)
    return source, expert, sizes, starts


# --- SwiGLU -----------------------------------------------------------------------------------------------------------


@triton.jit
def _load(x, row, column, stride):
    return tl.load(x + row.to(tl.int64)[:, None] * stride + column[None, :]).to(tl.float32)


@triton.jit
def _hidden(gate_up, scale, row, column, size, SCALED: tl.constexpr):
    """[32, 128] float32, rounded as the unfused operations would leave it; so are the gradients below."""
    gate = _load(gate_up, row, column, 2 * size)
    up = _load(gate_up, row, column + size, 2 * size)
    x = gate * _sigmoid(gate) * up
    if SCALED:
        x = x * tl.load(scale + row).to(tl.float32)[:, None]
    return _rounded(x).to(tl.float32)


@triton.jit
def _swiglu(gate_up, scale, values, scales, size, scales_stride, height, SCALED: tl.constexpr):
    column_tile, row_tile = tl.program_id(0), tl.program_id(1)
    column = column_tile * TILE + tl.arange(0, TILE)
    for quarter in tl.static_range(4):
        row = row_tile * TILE + quarter * QUARTER + tl.arange(0, QUARTER)
        x = _hidden(gate_up, scale, row, column, size, SCALED)
        _store_rows(x, values, scales, row, column, size, scales_stride, column_tile, height)


def cast_swiglu(gate_up: Tensor, scale: Tensor | None) -> Scaled:
    """gate_up [Mp, 2I], scale [Mp] or 1 -> rows of silu(gate) * up * scale [Mp, I], cast."""
    height, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = Buffers(gate_up, height, size, rows=True, columns=False)
    if height:
        _swiglu[(size // BLOCK, height // BLOCK)](
            gate_up, gate_up if scale is None else scale, out.row_values, out.row_scales,
            size, out.row_scales.stride(0), height, SCALED=scale is not None, num_warps=SWIGLU_WARPS,
        )  # fmt: skip
    return out.results()[0]


@triton.jit
def _gate_gradient(gate_up, scale, grad, grad_scale, row, column, size, SCALED: tl.constexpr):
    """[32, 128]; what these columns add to the gradient of `scale` goes to `grad_scale`."""
    gate = _load(gate_up, row, column, 2 * size)
    up = _load(gate_up, row, column + size, 2 * size)
    x = _load(grad, row, column, size) * up
    sigmoid = _sigmoid(gate)
    if SCALED:
        tl.store(grad_scale + row, tl.sum(x * gate * sigmoid, axis=1))
        x = x * tl.load(scale + row).to(tl.float32)[:, None]
    return _rounded(x * sigmoid * (1 + gate * (1 - sigmoid))).to(tl.float32)


@triton.jit
def _up_gradient(gate_up, scale, grad, row, column, size, SCALED: tl.constexpr):
    gate = _load(gate_up, row, column, 2 * size)
    x = _load(grad, row, column, size)
    if SCALED:
        x = x * tl.load(scale + row).to(tl.float32)[:, None]
    return _rounded(x * gate * _sigmoid(gate)).to(tl.float32)


@triton.jit
def _swiglu_backward(
    gate_up, scale, grad, grad_scale, row_values, row_scales, words, word_scales, hidden_words, hidden_scales,
    size, scales_stride, words_stride, height, SCALED: tl.constexpr,
):  # fmt: skip
    part, row_tile = tl.program_id(0) % 3, tl.program_id(1)  # neighbours share what they load through the cache
    column_tile = tl.program_id(0) // 3
    column = column_tile * TILE + tl.arange(0, TILE)
    row = row_tile * TILE + tl.arange(0, QUARTER) * 4
    if part == 0:
        a = _hidden(gate_up, scale, row, column, size, SCALED)
        b = _hidden(gate_up, scale, row + 1, column, size, SCALED)
        c = _hidden(gate_up, scale, row + 2, column, size, SCALED)
        d = _hidden(gate_up, scale, row + 3, column, size, SCALED)
        _store_columns(a, b, c, d, hidden_words, hidden_scales, row_tile, column, size, words_stride)
    else:
        if part == 1:
            grad_scale += column_tile.to(tl.int64) * height
            a = _gate_gradient(gate_up, scale, grad, grad_scale, row, column, size, SCALED)
            b = _gate_gradient(gate_up, scale, grad, grad_scale, row + 1, column, size, SCALED)
            c = _gate_gradient(gate_up, scale, grad, grad_scale, row + 2, column, size, SCALED)
            d = _gate_gradient(gate_up, scale, grad, grad_scale, row + 3, column, size, SCALED)
        else:
            a = _up_gradient(gate_up, scale, grad, row, column, size, SCALED)
            b = _up_gradient(gate_up, scale, grad, row + 1, column, size, SCALED)
            c = _up_gradient(gate_up, scale, grad, row + 2, column, size, SCALED)
            d = _up_gradient(gate_up, scale, grad, row + 3, column, size, SCALED)
        column += (part - 1) * size
        column_tile += (part - 1) * (size // TILE)
        width = 2 * size
        _store_rows(a, row_values, row_scales, row, column, width, scales_stride, column_tile, height)
        _store_rows(b, row_values, row_scales, row + 1, column, width, scales_stride, column_tile, height)
        _store_rows(c, row_values, row_scales, row + 2, column, width, scales_stride, column_tile, height)
        _store_rows(d, row_values, row_scales, row + 3, column, width, scales_stride, column_tile, height)
        _store_columns(a, b, c, d, words, word_scales, row_tile, column, width, words_stride)


def cast_swiglu_backward(
    gate_up: Tensor, scale: Tensor | None, grad: Tensor
) -> tuple[Scaled, Scaled, Scaled, Tensor | None]:
    """Of `cast_swiglu`, grad [Mp, I] being the gradient of its result: the gradient of gate_up [Mp, 2I] cast along rows
    and along columns, the result once more but cast along columns, and the gradient of scale [Mp] float32.
    """
    height, size = grad.shape
    out = Buffers(grad, height, 2 * size, rows=True, columns=True)
    hidden = Buffers(grad, height, size, rows=False, columns=True)
    grad_scale = grad.new_empty(0 if scale is None else size // BLOCK, height, dtype=torch.float32)
    if height:
        _swiglu_backward[(3 * size // BLOCK, height // BLOCK)](
            gate_up, grad if scale is None else scale, grad, grad_scale, *out.part(0), *hidden.part(0)[2:],
            size, out.row_scales.stride(0), out.whole // 4, height,
            SCALED=scale is not None, num_warps=SWIGLU_WARPS,
        )  # fmt: skip
    return *out.results(), hidden.results()[1], None if scale is None else grad_scale.sum(0)


# --- weight gradients -------------------------------------------------------------------------------------------------


@triton.jit
def _multiply_columns(
    a, b, a_scales, b_scales, out, starts, sizes, m, n, SIDE_M: tl.constexpr, SIDE_N: tl.constexpr, ADD: tl.constexpr
):
    tile, group = tl.program_id(0), tl.program_id(1)
    m_start = tile % (m // SIDE_M) * SIDE_M
    n_start = tile // (m // SIDE_M) * SIDE_N
    start, count = tl.load(starts + group), tl.load(sizes + group) // TILE
    m_place, n_place = m_start + tl.arange(0, SIDE_M), n_start + tl.arange(0, SIDE_N)
    a_scales += (start // TILE).to(tl.int64) * m + m_place
    b_scales += (start // TILE).to(tl.int64) * n + n_place
    total = tl.zeros((SIDE_M, SIDE_N), tl.float32)
    for block in range(count):
        left = a.load([m_start, start + block * TILE])
        right = b.load([n_start, start + block * TILE])
        total += tl.dot(left, right.T) * (tl.load(a_scales)[:, None] * tl.load(b_scales)[None, :])
        a_scales += m
        b_scales += n
    place = (group.to(tl.int64) * m + m_place)[:, None] * n + n_place[None, :]
    if ADD:
        total += tl.load(out + place)
    tl.store(out + place, total.to(out.dtype.element_ty))


def multiply_columns_of_groups(
    a: Scaled, b: Scaled, groups: GroupedRows, dtype: torch.dtype, into: Tensor | None
) -> Tensor:
    """a [M, Mp], b [N, Mp], cast along the rows of all groups -> [E, M, N]: per group e, a_e b_e^T, added to `into`."""
    m, n = a.values.shape[0], b.values.shape[0]
    shape = len(groups.sizes), m, n
    out = a.values.new_empty(shape, dtype=dtype) if into is None else into
    assert out.shape == shape, (out.shape, shape)
    assert out.is_contiguous()
    _multiply_columns[(m // SIDE_M * (n // SIDE_N), len(out))](
        TensorDescriptor.from_tensor(a.values, [SIDE_M, BLOCK]),
        TensorDescriptor.from_tensor(b.values, [SIDE_N, BLOCK]),
        a.scales.t(), b.scales.t(), out, groups.starts, groups.sizes, m, n,
        SIDE_M, SIDE_N, into is not None, num_warps=4, num_stages=STAGES,
    )  # fmt: skip
    return out
