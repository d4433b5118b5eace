"""Experts whose GEMMs are block-scaled, from the routed tokens to what goes back to them as one operation.

Rows lie in the padded order of `fp8_groups`, so that no block of 128 tokens crosses experts. The activation is never
written: forward casts it for the second GEMM, backward makes it again where the second weight's gradient needs it, and
the gradient of the first product leaves as e4m3 already. The host waits for nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.models.experts.dispatch import LocalDispatch, collect, sort_by_expert, spread
from prl.models.experts.stacked import Experts
from prl.models.fp8.cast import cast, cast_blocks, cast_columns, cast_rows, has_kernel
from prl.models.fp8.format import Scaled
from prl.models.fp8.gemm import Backend, multiply_group_columns, multiply_groups
from prl.models.fp8.groups import GroupedRows, group_rows
from prl.models.sharding import local_part


class _ScaledExperts(torch.autograd.Function):
    """`scaled_experts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        down: Tensor,
        scale: Tensor,
        groups: GroupedRows,
        padded: bool,
        backend: str,
    ) -> Tensor:
        gated = first.shape[1] == 2 * down.shape[2]
        rows, _ = cast([x], rows=True, columns=False, source=groups.source_of(padded))
        hidden = multiply_groups(rows, cast_blocks(first), groups, x.dtype, backend)  # [Mp, 2I], or [Mp, I]
        activated = (cast_swiglu if gated else cast_squared_relu)(hidden, scale)
        ctx.args = groups, padded, backend, gated
        ctx.save_for_backward(x, first, down, scale, hidden)
        y = multiply_groups(activated, cast_blocks(down), groups, x.dtype, backend)
        return y if padded else groups.unpad(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, first, down, scale, hidden = ctx.saved_tensors
        groups, padded, backend, gated = ctx.args
        source = groups.source_of(padded)
        rows, columns = cast([grads[0]], rows=True, columns=True, source=source)
        grad = multiply_groups(rows, cast_blocks(down, transposed=True), groups, x.dtype, backend)  # [Mp, I]
        casts = cast_swiglu_backward if gated else cast_squared_relu_backward
        rows, hidden_columns, activated, grad_scale = casts(hidden, scale, grad)
        del hidden, grad
        grad_down = multiply_group_columns(columns, activated, groups, down.dtype, backend)
        grad_x = multiply_groups(rows, cast_blocks(first, transposed=True), groups, x.dtype, backend)
        _, columns = cast([x], rows=False, columns=True, source=source)
        grad_first = multiply_group_columns(hidden_columns, columns, groups, first.dtype, backend)
        grad_x = grad_x if padded else groups.unpad(grad_x)
        return grad_x, grad_first, grad_down, grad_scale.to(scale.dtype), None, None, None


def scaled_experts(
    x: Tensor, first: Tensor, down: Tensor, scale: Tensor, groups: GroupedRows, padded: bool, backend: Backend
) -> Tensor:
    """x [M, H] sorted by expert, first [E, 2I, H], down [E, H, I] -> down_e (silu(gate) * up * scale) [M, H]; where
    there is no gate, first [E, I, H] and the squared ReLU.

    scale [Mp] is in the padded order. padded: x and the result are too, [Mp, H]; then it does not matter what lies in
    rows of padding, in the gradients neither.
    """
    return _ScaledExperts.apply(x, first, down, scale, groups, padded, backend)


# --- the activation ---------------------------------------------------------------------------------------------------


def cast_swiglu(gate_up: Tensor, scale: Tensor) -> Scaled:
    """gate_up [Mp, 2I], scale [Mp] -> `cast_rows` of silu(gate) * up * scale [Mp, I] (arXiv:2002.05202)."""
    if has_kernel(gate_up):
        from prl.models.fp8 import expert_kernels as fp8_expert_kernels

        return fp8_expert_kernels.cast_swiglu(gate_up, scale)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return cast_rows((gate * gate.sigmoid() * up * scale.float()[:, None]).to(gate_up.dtype))


def cast_swiglu_backward(gate_up: Tensor, scale: Tensor, grad: Tensor) -> tuple[Scaled, Scaled, Scaled, Tensor]:
    """Of `cast_swiglu`, grad [Mp, I] being the gradient of its result: the gradient of gate_up [Mp, 2I] cast along rows
    and along columns, the result once more but cast along columns, and the gradient of scale [Mp] float32.
    """
    if has_kernel(gate_up):
        from prl.models.fp8 import expert_kernels as fp8_expert_kernels

        return fp8_expert_kernels.cast_swiglu_backward(gate_up, scale, grad)
    dtype = grad.dtype
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid, scale, grad = gate.sigmoid(), scale.float()[:, None], grad.float()
    grad_gate = (grad * up * scale * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype)
    grad_up = (grad * scale * gate * sigmoid).to(dtype)
    rows, columns = cast([grad_gate, grad_up], rows=True, columns=True)
    activated = cast_columns((gate * sigmoid * up * scale).to(dtype))
    return rows, columns, activated, (grad * gate * sigmoid * up).sum(1)


def cast_squared_relu(up: Tensor, scale: Tensor) -> Scaled:
    """up [Mp, I], scale [Mp] -> `cast_rows` of relu(up) ** 2 * scale [Mp, I] (arXiv:2109.08668)."""
    return cast_rows((up.float().relu().square() * scale.float()[:, None]).to(up.dtype))


def cast_squared_relu_backward(up: Tensor, scale: Tensor, grad: Tensor) -> tuple[Scaled, Scaled, Scaled, Tensor]:
    """As `cast_swiglu_backward`, of `cast_squared_relu`."""
    dtype, positive, scale, grad = grad.dtype, up.float().relu(), scale.float()[:, None], grad.float()
    rows, columns = cast([(2 * grad * scale * positive).to(dtype)], rows=True, columns=True)
    activated = cast_columns((positive.square() * scale).to(dtype))
    return rows, columns, activated, (grad * positive.square()).sum(1)


# --- the module -------------------------------------------------------------------------------------------------------


class PadRows(torch.autograd.Function):
    """[M, ...] -> [Mp, ...]. Its backward looks at no row that belongs to nobody."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, groups: GroupedRows) -> Tensor:
        ctx.groups = groups
        return groups.pad(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.groups.unpad(grads[0]), None


class Fp8Experts(Experts):
    """Experts whose GEMMs are block-scaled. Where all experts are local, tokens come and go in the padded order."""

    backend: Backend

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]."""
        if not isinstance(self.dispatch, LocalDispatch) or not len(x):
            return super().forward(x, weights, experts)
        order, positions, counts = sort_by_expert(experts, self.num_experts)
        groups = group_rows(counts, len(order))
        order, positions = order[groups.source.clamp(min=0)], groups.target[positions]
        scale = spread(weights.flatten(), order, positions.view(-1, 1))
        y = self.scaled(spread(x, order, positions), scale, groups, padded=True)
        return collect(y, order, positions)

    def grouped_mlp(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        groups = group_rows(counts, len(x))
        return self.scaled(x, PadRows.apply(scale[:, None], groups).squeeze(1), groups, padded=False)

    def scaled(self, x: Tensor, scale: Tensor, groups: GroupedRows, padded: bool) -> Tensor:
        """`scaled_experts` with the weights held here."""
        first, down = local_part(self.first_proj), local_part(self.down_proj)
        return scaled_experts(x, first, down, scale, groups, padded, self.backend)
