"""Training with block-scaled FP8 GEMMs (DeepSeek-V3, arXiv:2412.19437): linears and grouped experts.

Forward, input gradient and weight gradient all multiply e4m3 values; master weights, gradients, accumulation and what
happens between the GEMMs stay as they were. Embeddings, LM head, router and norms are left alone. Weights are cast anew
in each forward and backward pass, because sharded training holds them whole only then. Activations are saved in
bfloat16, which several projections share, and cast along tokens in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from prl.models.fp8_cast import Scaled, cast_blocks, cast_both, cast_columns, cast_rows, has_kernel
from prl.models.fp8_gemm import (
    Backend,
    deep_gemm,
    multiply,
    multiply_columns,
    multiply_group_columns,
    multiply_groups,
)
from prl.models.fp8_groups import GroupedRows, group_rows
from prl.models.moe import Experts, local_part

KEPT = ("embed_tokens", "lm_head", "gate")  # names of modules that stay as they are; "gate" is the router


# --- linear -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("prl::fp8_linear", mutates_args=())
def fp8_linear(x: Tensor, weight: Tensor, backend: str) -> Tensor:
    """x [T, K], weight [N, K] -> x weight^T [T, N] in x's dtype."""
    return multiply(cast_rows(x), cast_blocks(weight), x.dtype, backend)


@fp8_linear.register_fake
def _(x: Tensor, weight: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


@torch.library.custom_op("prl::fp8_linear_backward", mutates_args=())
def fp8_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, backend: str, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    """grad [T, N] -> gradients of x [T, K] and weight [N, K]; empty where they are not wanted."""
    grad = grad.contiguous()
    grad_x, grad_weight = x.new_empty(0), weight.new_empty(0)
    rows, columns = _casts(grad, wants_x, wants_weight)
    if rows is not None:
        grad_x = multiply(rows, cast_blocks(weight, transposed=True), x.dtype, backend)
    if columns is not None:
        grad_weight = multiply_columns(columns, cast_columns(x), weight.dtype, backend)
    return grad_x, grad_weight


@fp8_linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, backend: str, wants_x: bool, wants_weight: bool
) -> tuple[Tensor, Tensor]:
    grad_x = x.new_empty(x.shape) if wants_x else x.new_empty(0)
    return grad_x, weight.new_empty(weight.shape) if wants_weight else weight.new_empty(0)


def _casts(grad: Tensor, rows: bool, columns: bool) -> tuple[Scaled | None, Scaled | None]:
    if rows and columns:
        return cast_both(grad)
    return cast_rows(grad) if rows else None, cast_columns(grad) if columns else None


def _save_linear(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, weight, ctx.backend = inputs
    ctx.save_for_backward(x, weight)


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight = ctx.saved_tensors
    wants_x, wants_weight, _ = ctx.needs_input_grad
    grad_x, grad_weight = fp8_linear_backward(grad, x, weight, ctx.backend, wants_x, wants_weight)
    return grad_x if wants_x else None, grad_weight if wants_weight else None, None


fp8_linear.register_autograd(_linear_backward, setup_context=_save_linear)


class Fp8Linear(nn.Linear):
    """A linear layer whose three GEMMs are block-scaled. Takes over the parameters of the one that it replaces."""

    def __init__(self, linear: nn.Linear, backend: Backend) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.backend = linear.in_features, linear.out_features, backend
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        y = fp8_linear(x.reshape(-1, self.in_features), self.weight, self.backend)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias


# --- experts ----------------------------------------------------------------------------------------------------------


class GroupedMM(torch.autograd.Function):
    """Rows in groups, each times its own matrix. `padded_in`, `padded_out`: rows come and go in the padded order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, groups: GroupedRows, backend: str, padded_in: bool, padded_out: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.args = (groups, backend, padded_in, padded_out)
        # weight gradients need the sizes on the host: fetched now, they have long arrived when backward comes
        ctx.sizes = groups.sizes.to("cpu", non_blocking=True) if ctx.needs_input_grad[1] else None
        ctx.arrival = torch.cuda.current_stream().record_event() if x.is_cuda else None
        rows, _ = cast_grouped(x, groups, padded_in, rows=True, columns=False)
        y = multiply_groups(rows, cast_blocks(weight), groups, x.dtype, backend)
        return y if padded_out else groups.unpad(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        groups, backend, padded_in, padded_out = ctx.args
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        rows, columns = cast_grouped(grads[0].contiguous(), groups, padded_out, wants_x, wants_weight)
        grad_x = grad_weight = None
        if wants_x:
            grad_x = multiply_groups(rows, cast_blocks(weight, transposed=True), groups, x.dtype, backend)
            grad_x = grad_x if padded_in else groups.unpad(grad_x)
        if wants_weight:
            if ctx.arrival is not None:
                ctx.arrival.synchronize()
            _, x_columns = cast_grouped(x, groups, padded_in, rows=False, columns=True)
            sizes = ctx.sizes.tolist()
            grad_weight = multiply_group_columns(columns, x_columns, sizes, weight.dtype, backend)
        return grad_x, grad_weight, None, None, None, None


def cast_grouped(x: Tensor, groups: GroupedRows, padded: bool, rows: bool, columns: bool) -> tuple[Scaled, Scaled]:
    """`cast_rows` of x [M, K] in the padded order, and its columns per group as `multiply_group_columns` wants them.

    padded: x is [Mp, K], in that order already. What is not wanted may be empty.
    """
    if has_kernel(x):
        from prl.models.fp8_kernels import cast_tiles

        return cast_tiles(x, rows, columns, groups, padded)
    ordered = x if padded else groups.pad(x)
    sizes = groups.sizes.tolist()
    parts = [cast_columns(part) for part in ordered[: sum(sizes)].split(sizes)]
    values = torch.cat([part.values.flatten() for part in parts])
    return cast_rows(ordered), Scaled(values, torch.cat([part.scales for part in parts], 1))


def fp8_grouped_mm(x: Tensor, weight: Tensor, counts: Tensor, backend: Backend) -> Tensor:
    """x [M, K] in slices of counts [E] rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T."""
    return grouped_mm(x, weight, group_rows(counts, len(x)), backend)


def grouped_mm(
    x: Tensor,
    weight: Tensor,
    groups: GroupedRows,
    backend: Backend,
    padded_in: bool = False,
    padded_out: bool = False,
) -> Tensor:
    """`GroupedMM` for rows that are laid out already."""
    return GroupedMM.apply(x.contiguous(), weight, groups, backend, padded_in, padded_out)


class PadRows(torch.autograd.Function):
    """[M, H] -> [Mp, H]. Its backward looks at no row that belongs to nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: GroupedRows) -> Tensor:
        ctx.groups = groups
        return groups.pad(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.unpad(grads[0]), None


class Fp8Experts(Experts):
    """Experts whose GEMMs are block-scaled. Between its two GEMMs the rows stay in the padded order."""

    backend: Backend

    def grouped_swiglu(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        gate_up, down = local_part(self.gate_up_proj), local_part(self.down_proj)
        groups = group_rows(counts, len(x))
        hidden = grouped_mm(x, gate_up, groups, self.backend, padded_out=True)
        hidden = self.activate(hidden, PadRows.apply(scale[:, None], groups).squeeze(1))
        return grouped_mm(hidden, down, groups, self.backend, padded_in=True)


# --- models -----------------------------------------------------------------------------------------------------------


def apply_fp8(model: nn.Module, backend: Backend) -> None:
    """Have all linears and experts of a model multiply in FP8. Before compilation, checkpointing and sharding.

    Raises UserError when DeepGEMM is asked for and cannot run here.
    """
    if backend == "deep_gemm":
        deep_gemm()
    for module in list(model.modules()):
        if isinstance(module, Experts):
            module.__class__ = Fp8Experts
            assert isinstance(module, Fp8Experts)
            module.backend = backend
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name not in KEPT:
                setattr(module, name, Fp8Linear(child, backend))
