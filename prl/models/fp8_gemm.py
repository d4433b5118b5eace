"""Block-scaled GEMMs: DeepGEMM's kernels for Hopper, and the same arithmetic in float32 for tests and for CPU.

Every product of training is one of four: plain or grouped by expert, with weights (a 1x128, b 128x128) or, for weight
gradients, with activations on both sides (1x128 each, along tokens).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from prl.config.errors import UserError
from prl.models.fp8_cast import BLOCK, Scaled, restore_blocks, restore_rows
from prl.models.fp8_groups import GroupedRows

Backend = Literal["deep_gemm", "emulated"]


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, backend: str) -> Tensor:
    """a [M, K] in rows, b [N, K] in blocks -> a b^T [M, N]."""
    if backend == "emulated":
        return (restore_rows(a) @ restore_blocks(b).t()).to(dtype)
    out = a.values.new_empty(a.values.shape[0], b.values.shape[0], dtype=torch.bfloat16)
    deep_gemm().fp8_gemm_nt(tuple(a), tuple(b), out, recipe=(1, BLOCK, BLOCK))
    return out


def multiply_columns(a: Scaled, b: Scaled, dtype: torch.dtype, backend: str) -> Tensor:
    """a [M, T], b [N, T], both of `cast_columns` -> a b^T [M, N]: summed over tokens, in float32."""
    if backend == "emulated":
        return (restore_rows(a) @ restore_rows(b).t()).to(dtype)
    out = a.values.new_zeros(a.values.shape[0], b.values.shape[0], dtype=torch.float32)
    # the kernel adds to its output; the number of tokens varies, so it must not be compiled in
    deep_gemm().fp8_gemm_nt(tuple(a), tuple(b), out, c=out, recipe=(1, 1, BLOCK), compiled_dims="mn")
    return out.to(dtype)


def multiply_groups(a: Scaled, b: Scaled, groups: GroupedRows, dtype: torch.dtype, backend: str) -> Tensor:
    """a [Mp, K] in rows, b [E, N, K] in blocks -> [Mp, N], each group of rows times its own matrix.

    Rows behind the last group are not defined.
    """
    if backend == "emulated":
        rows, matrices = restore_rows(a), restore_blocks(b)
        sizes = groups.sizes.tolist()
        parts = rows[: sum(sizes)].split(sizes)
        out = torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])
        return torch.cat([out, out.new_zeros(groups.padded - len(out), out.shape[1])]).to(dtype)
    out = a.values.new_empty(a.values.shape[0], b.values.shape[1], dtype=torch.bfloat16)
    deep_gemm().m_grouped_fp8_gemm_nt_contiguous(tuple(a), tuple(b), out, groups.expert, recipe=(1, BLOCK, BLOCK))
    return out


def multiply_group_columns(a: Scaled, b: Scaled, sizes: list[int], dtype: torch.dtype, backend: str) -> Tensor:
    """Per group e, a_e [M, sizes[e]] times b_e [N, sizes[e]] transposed -> [E, M, N], summed over its tokens.

    a and b are flat: one [M, size] matrix after the other, with scales [M, Mp / 128].
    """
    total, m, n = sum(sizes), a.scales.shape[0], b.scales.shape[0]
    flat_a, flat_b = (
        Scaled(x.values[: total * x.scales.shape[0]], x.scales[:, : total // BLOCK]) for x in (a, b)
    )  # what lies behind the last group belongs to nobody
    if backend == "emulated":
        return torch.stack(
            [left @ right.t() for left, right in zip(matrices(flat_a, sizes), matrices(flat_b, sizes), strict=True)]
        ).to(dtype)
    out = a.values.new_zeros(len(sizes), m, n, dtype=torch.float32)
    # one call per expert: k_grouped_fp8_gemm_nt_contiguous came out 13-18 % off (H200, vLLM 0.23's copy)
    for expert, size, left, right in zip(out, sizes, slices(flat_a, sizes), slices(flat_b, sizes), strict=True):
        if size:
            deep_gemm().fp8_gemm_nt(left, right, expert, c=expert, recipe=(1, 1, BLOCK), compiled_dims="mn")
    return out.to(dtype)


def slices(flat: Scaled, sizes: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Values [M, size] and scales [M, size / 128] of each matrix of a flat buffer."""
    m = flat.scales.shape[0]
    values = [part.view(m, -1) for part in flat.values.split([m * size for size in sizes])]
    scales = [part.contiguous() for part in flat.scales.split([size // BLOCK for size in sizes], dim=1)]
    return list(zip(values, scales, strict=True))


def matrices(flat: Scaled, sizes: list[int]) -> list[Tensor]:
    """float32 matrices [M, size] of a flat buffer."""
    m = flat.scales.shape[0]
    values = [part.view(m, -1) for part in flat.values.float().split([m * size for size in sizes])]
    scales = flat.scales.split([size // BLOCK for size in sizes], dim=1)
    return [v * s.repeat_interleave(BLOCK, 1) for v, s in zip(values, scales, strict=True)]


@functools.cache
def deep_gemm() -> ModuleType:
    """The package `deep_gemm`, or the copy that vLLM bundles. Raises UserError without it or without a Hopper GPU."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        raise UserError(
            "Block-scaled FP8 training needs a Hopper GPU (H100, H200, H800).",
            where=f"model.fp8=deep_gemm, {device}",
            why="DeepGEMM's kernels with float32 scales are written for its tensor cores (sm_90)",
            fix="model.fp8=none; model.fp8=emulated gives the same rounding on any device, slowly",
        )
    try:
        import deep_gemm as module
    except ImportError as first:
        try:
            from vllm.third_party import deep_gemm as module
        except ImportError as second:
            raise UserError(
                f"DeepGEMM cannot be imported ({first}; {second}).",
                where="model.fp8=deep_gemm",
                why="its kernels come from the package deep_gemm, or from the copy inside vLLM",
                fix="pip install vllm, or build github.com/deepseek-ai/DeepGEMM; it needs nvcc (CUDA_HOME) at run time",
            ) from second
    alignment = module.get_mk_alignment_for_contiguous_layout()
    assert BLOCK % alignment == 0, f"DeepGEMM wants groups aligned to {alignment} rows"
    return module
