"""Block-scaled GEMMs: the fastest kernels there are for Hopper, mostly DeepGEMM's, and the same arithmetic in float32
for tests and for CPU.

Every product of training is one of four: plain or grouped by expert, with weights (a 1x128, b 128x128) or, for weight
gradients, with activations on both sides (1x128 each, along tokens).
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.errors import UserError
from prl.config.packages import DEEP_GEMM, NOT_LOADED
from prl.models.fp8.cast import restore_blocks, restore_rows
from prl.models.fp8.format import BLOCK, Scaled
from prl.models.fp8.groups import GroupedRows

Backend = Literal["deep_gemm", "emulated"]


def multiply(a: Scaled, b: Scaled, dtype: torch.dtype, backend: str) -> Tensor:
    """a [M, K] in rows, b [N, K] in blocks -> a b^T [M, N]."""
    if backend == "emulated":
        return (restore_rows(a) @ restore_blocks(b).t()).to(dtype)
    out = a.values.new_empty(a.values.shape[0], b.values.shape[0], dtype=torch.bfloat16)
    deep_gemm().fp8_gemm_nt(tuple(a), tuple(b), out, recipe=(1, BLOCK, BLOCK))
    return out


def multiply_columns(a: Scaled, b: Scaled, dtype: torch.dtype, backend: str) -> Tensor:
    """a [M, T], b [N, T], both of `cast_columns` -> a b^T [M, N], summed over tokens."""
    if backend == "emulated":
        return (restore_rows(a) @ restore_rows(b).t()).to(dtype)
    # cuBLAS: DeepGEMM's kernel for two activations only adds to a float32 matrix, which costs more than the GEMM gains
    kind = F.ScalingType.BlockWise1x128
    return F.scaled_mm(a.values, b.values.t(), a.scales, kind, b.scales, kind, output_dtype=torch.bfloat16)


def multiply_groups(a: Scaled, b: Scaled, groups: GroupedRows, dtype: torch.dtype, backend: str) -> Tensor:
    """a [Mp, K] in rows, b [E, N, K] in blocks -> [Mp, N], each group of rows times its own matrix.

    Rows behind the last group are not defined.
    """
    if backend == "emulated":
        rows, matrices = restore_rows(a), restore_blocks(b)
        sizes = groups.sizes.tolist()
        parts = rows[: sum(sizes)].split(sizes)
        out = torch.cat([part @ matrix.t() for part, matrix in zip(parts, matrices, strict=True)])
        return torch.cat([out, out.new_zeros(len(rows) - len(out), out.shape[1])]).to(dtype)
    out = a.values.new_empty(a.values.shape[0], b.values.shape[1], dtype=torch.bfloat16)
    deep_gemm().m_grouped_fp8_gemm_nt_contiguous(tuple(a), tuple(b), out, groups.expert, recipe=(1, BLOCK, BLOCK))
    return out


def multiply_group_columns(
    a: Scaled, b: Scaled, groups: GroupedRows, dtype: torch.dtype, backend: str, into: Tensor | None = None
) -> Tensor:
    """a [M, Mp], b [N, Mp], both of `cast_columns` -> [E, M, N]: a b^T summed over the rows of each group.

    into: a matrix to add it to instead, which is returned.

    Not DeepGEMM's k_grouped_fp8_gemm_nt_contiguous: it adds to float32 matrices, and before DeepGEMM#343 (as in vLLM
    0.23's copy) it overwrites a group's TMA descriptors while loads may still read them. There it was 13-18 % off.
    """
    if backend == "emulated":
        sizes = groups.sizes.tolist()
        left, right = (restore_rows(x)[:, : sum(sizes)].split(sizes, dim=1) for x in (a, b))
        products = torch.stack([x @ y.t() for x, y in zip(left, right, strict=True)]).to(dtype)
        return products if into is None else into.add_(products)
    from prl.models.fp8.expert_kernels import multiply_columns_of_groups

    return multiply_columns_of_groups(a, b, groups, dtype, into)


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
    except NOT_LOADED as first:
        try:
            from vllm.third_party import deep_gemm as module
        except NOT_LOADED as second:
            raise UserError(
                f"DeepGEMM cannot be imported ({first}; {second}).",
                where=f"model.fp8=deep_gemm, {DEEP_GEMM.installed}",
                why="its kernels come from the package deep_gemm, built for this PyTorch, or from the copy inside vLLM",
                fix=DEEP_GEMM.install,
            ) from second
    alignment = module.get_mk_alignment_for_contiguous_layout()
    assert BLOCK % alignment == 0, f"DeepGEMM wants groups aligned to {alignment} rows"
    return module
