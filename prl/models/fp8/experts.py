"""SwiGLU experts whose GEMMs are block-scaled, from the routed tokens to what goes back to them as one operation.

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


class SwigluExperts(torch.autograd.Function):
    """`swiglu_experts`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        scale: Tensor,
        groups: GroupedRows,
        padded: bool,
        backend: str,
    ) -> Tensor:
        rows, _ = cast([x], rows=True, columns=False, source=groups.source_of(padded))
        hidden = multiply_groups(rows, cast_blocks(gate_up), groups, x.dtype, backend)  # [Mp, 2I]
        activated = cast_swiglu(hidden, scale)
        ctx.args = groups, padded, backend
        ctx.save_for_backward(x, gate_up, down, scale, hidden)
        y = multiply_groups(activated, cast_blocks(down), groups, x.dtype, backend)
        return y if padded else groups.unpad(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gate_up, down, scale, hidden = ctx.saved_tensors
        groups, padded, backend = ctx.args
        source = groups.source_of(padded)
        rows, columns = cast([grads[0]], rows=True, columns=True, source=source)
        grad = multiply_groups(rows, cast_blocks(down, transposed=True), groups, x.dtype, backend)  # [Mp, I]
        rows, hidden_columns, activated, grad_scale = cast_swiglu_backward(hidden, scale, grad)
        del hidden, grad
        grad_down = multiply_group_columns(columns, activated, groups, down.dtype, backend)
        grad_x = multiply_groups(rows, cast_blocks(gate_up, transposed=True), groups, x.dtype, backend)
        _, columns = cast([x], rows=False, columns=True, source=source)
        grad_gate_up = multiply_group_columns(hidden_columns, columns, groups, gate_up.dtype, backend)
        grad_x = grad_x if padded else groups.unpad(grad_x)
        return grad_x, grad_gate_up, grad_down, grad_scale.to(scale.dtype), None, None, None


def swiglu_experts(
    x: Tensor, gate_up: Tensor, down: Tensor, scale: Tensor, groups: GroupedRows, padded: bool, backend: Backend
) -> Tensor:
    """x [M, H] sorted by expert, gate_up [E, 2I, H], down [E, H, I] -> down_e (silu(gate) * up * scale) [M, H].

    scale [Mp] is in the padded order. padded: x and the result are too, [Mp, H]; then it does not matter what lies in
    rows of padding, in the gradients neither.
    """
    return SwigluExperts.apply(x, gate_up, down, scale, groups, padded, backend)


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
        y = self.swiglu(spread(x, order, positions), scale, groups, padded=True)
        return collect(y, order, positions)

    def grouped_mlp(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [M, H] sorted by the experts held here, counts [E_local], scale [M] -> [M, H], each row times its scale."""
        groups = group_rows(counts, len(x))
        return self.swiglu(x, PadRows.apply(scale[:, None], groups).squeeze(1), groups, padded=False)

    def swiglu(self, x: Tensor, scale: Tensor, groups: GroupedRows, padded: bool) -> Tensor:
        """`swiglu_experts` with the weights held here."""
        gate_up, down = local_part(self.first_proj), local_part(self.down_proj)
        return swiglu_experts(x, gate_up, down, scale, groups, padded, self.backend)
