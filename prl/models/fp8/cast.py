"""Casts to block-scaled e4m3, as DeepSeek-V3 trains with (arXiv:2412.19437, section 3.3).

Activations and gradients have one float32 scale per 128 values along the dimension that a GEMM contracts (1x128),
weights one per 128x128 block. A scale is the block's largest magnitude over 448, the largest e4m3 value, so an outlier
costs precision in its own block only. On CUDA tensors whose sizes are multiples of 128 the Triton kernels of
`fp8_kernels` do it in one pass; everywhere else the formulas below, which give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.models.fp8.format import BLOCK, E4M3_MAX, SMALLEST, Scaled


def cast_rows(x: Tensor) -> Scaled:
    """x [M, K] with 1x128 blocks along K -> values [M, K], scales [M, ceil(K / 128)]."""
    return cast([x], rows=True, columns=False)[0]


def cast_columns(x: Tensor) -> Scaled:
    """x [M, K] with blocks of 128 along M -> transposed values [K, Mp] and scales [K, Mp / 128].

    Mp is M rounded up to a multiple of 128; what is added is zero.
    """
    return cast([x], rows=False, columns=True)[1]


def cast(parts: Sequence[Tensor], rows: bool, columns: bool, source: Tensor | None = None) -> tuple[Scaled, Scaled]:
    """`cast_rows` and `cast_columns` of parts [M, K_i] side by side, each read once; what is not wanted may be empty.

    source [Mp] int64: the rows to take, -1 for zeros.
    """
    if all(has_kernel(part) for part in parts):
        from prl.models.fp8.kernels import cast_tiles

        return cast_tiles(parts, rows, columns, source)
    x = torch.cat(list(parts), 1)
    if source is not None:
        taken = x[source.clamp(min=0)] if len(x) else x.new_zeros(len(source), x.shape[1])
        x = taken.where((source >= 0)[:, None], 0)
    empty = Scaled(x.new_empty(0), x.new_empty(0))
    by_column = empty
    if columns:
        by_column = _cast_rows(F.pad(x, (0, 0, 0, -x.shape[0] % BLOCK)).t())
        by_column = by_column._replace(scales=by_column.scales.t().contiguous().t())  # cuBLAS wants them laid out so
    return _cast_rows(x) if rows else empty, by_column


def _cast_rows(x: Tensor) -> Scaled:
    count = -(-x.shape[1] // BLOCK)
    blocks = F.pad(x.float(), (0, -x.shape[1] % BLOCK)).unflatten(1, (count, BLOCK))  # [M, K / 128, 128]
    amax = blocks.abs().amax(-1).clamp(min=SMALLEST)
    values = quantise(blocks, amax[..., None]).flatten(1)[:, : x.shape[1]]
    return Scaled(values.contiguous(), amax / E4M3_MAX)


def cast_blocks(weight: Tensor, transposed: bool = False, rounded: torch.dtype | None = None) -> Scaled:
    """weight [..., N, K] in 128x128 blocks -> values of the same shape, scales [..., ceil(N / 128), ceil(K / 128)].

    transposed: values [..., K, N] and their scales; the numbers are the same. rounded: as if the weight had been cast
    to this dtype before.
    """
    return join_blocks([weight], transposed, rounded)


def join_blocks(parts: Sequence[Tensor], transposed: bool = False, rounded: torch.dtype | None = None) -> Scaled:
    """`cast_blocks` of parts [..., N_i, K], one below the other."""
    if all(has_kernel(part, rounded) and part.shape[-2] % BLOCK == 0 for part in parts):
        from prl.models.fp8.kernels import cast_weights

        return cast_weights(parts, transposed)
    weight = torch.cat(list(parts), -2)
    if rounded is not None:
        weight = weight.to(rounded)
    n, k = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -k % BLOCK, 0, -n % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., N / 128, 128, K / 128, 128]
    amax = blocks.abs().amax((-1, -3)).clamp(min=SMALLEST)
    values = quantise(blocks, amax[..., :, None, :, None]).flatten(-2).flatten(-3, -2)[..., :n, :k]
    scales = amax / E4M3_MAX
    if transposed:
        values, scales = values.transpose(-1, -2), scales.transpose(-1, -2)
    return Scaled(values.contiguous(), scales.contiguous())


def quantise(x: Tensor, amax: Tensor) -> Tensor:
    """x / (amax / 448) in e4m3, rounded to nearest even."""
    largest = torch.tensor(E4M3_MAX, device=amax.device)  # a number here would be multiplied by a rounded 1 / amax
    return (x * (largest / amax)).to(torch.float8_e4m3fn)


def restore_rows(x: Scaled) -> Tensor:
    """float32 values of `cast_rows` or `cast_columns`."""
    return x.values.float() * x.scales.repeat_interleave(BLOCK, -1)[..., : x.values.shape[-1]]


def restore_blocks(weight: Scaled) -> Tensor:
    """float32 values of `cast_blocks`."""
    n, k = weight.values.shape[-2:]
    scales = weight.scales.repeat_interleave(BLOCK, -1).repeat_interleave(BLOCK, -2)
    return weight.values.float() * scales[..., :n, :k]


def has_kernel(x: Tensor, rounded: torch.dtype | None = None) -> bool:
    return x.is_cuda and x.shape[-1] % BLOCK == 0 and (rounded or x.dtype) == torch.bfloat16
