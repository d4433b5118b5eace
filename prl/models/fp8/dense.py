"""A dense MLP whose GEMMs are block-scaled, as one operation: its activation is never written in 16 bits. Forward casts
it for the last GEMM, and backward makes it again, cast for the gradient of the last weight, where it casts the gradient
of the first product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prl.models.experts.routing import RoutingRecorder
from prl.models.fp8.activations import cast_swiglu, cast_swiglu_backward
from prl.models.fp8.cast import cast, cast_blocks, join_blocks
from prl.models.fp8.format import BLOCK
from prl.models.fp8.gemm import multiply, multiply_columns
from prl.models.fp8.linears import Fp8Linear, apply_linears
from prl.models.layers.mlp import DenseMLP


@torch.library.custom_op("prl::fp8_swiglu", mutates_args=())
def fp8_swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """x [T, H], gate and up [I, H], down [H, I] -> down (silu(gate x) * up x) [T, H] (arXiv:2002.05202), and both first
    products [Tp, 2I] for backward, T rounded up to a multiple of 128.
    """
    rows, _ = cast([x], rows=True, columns=False, source=whole_blocks(x))
    hidden = multiply(rows, join_blocks([gate, up]), x.dtype, backend)
    y = multiply(cast_swiglu(hidden, None), cast_blocks(down), x.dtype, backend)
    return y[: len(x)].contiguous(), hidden


@fp8_swiglu.register_fake
def _(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    padded = (x.shape[0] + BLOCK - 1) // BLOCK * BLOCK
    return x.new_empty(x.shape[0], down.shape[0]), x.new_empty(padded, 2 * gate.shape[0])


@torch.library.custom_op("prl::fp8_swiglu_backward", mutates_args=())
def fp8_swiglu_backward(
    grad: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, hidden: Tensor, backend: str
) -> list[Tensor]:
    """grad [T, H] -> gradients of x, of gate and up, joined [2I, H], and of down."""
    source = whole_blocks(x)
    rows, columns = cast([grad], rows=True, columns=True, source=source)
    inner = multiply(rows, cast_blocks(down, transposed=True), x.dtype, backend)  # [Tp, I]
    rows, hidden_columns, activated, _ = cast_swiglu_backward(hidden, None, inner)
    del inner
    grad_down = multiply_columns(columns, activated, x.dtype, backend)
    grad_x = multiply(rows, join_blocks([gate, up], transposed=True), x.dtype, backend)[: len(x)].contiguous()
    _, columns = cast([x], rows=False, columns=True, source=source)
    joined = multiply_columns(hidden_columns, columns, x.dtype, backend)  # [2I, H]
    return [grad_x, joined, grad_down]


@fp8_swiglu_backward.register_fake
def _(grad: Tensor, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, hidden: Tensor, backend: str) -> list[Tensor]:
    return [x.new_empty(shape) for shape in (x.shape, (2 * gate.shape[0], gate.shape[1]), down.shape)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.backend = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    grad_x, joined, grad_down = fp8_swiglu_backward(grad, *ctx.saved_tensors, ctx.backend)
    found = grad_x, *joined.chunk(2), grad_down
    return *(part if wanted else None for part, wanted in zip(found, ctx.needs_input_grad, strict=False)), None


fp8_swiglu.register_autograd(_backward, setup_context=_save)


def whole_blocks(x: Tensor) -> Tensor | None:
    """For x [T, H] each row [Tp], and -1 to fill up the last block of 128; None where it is full."""
    if len(x) % BLOCK == 0:
        return None
    row = torch.arange(-(-len(x) // BLOCK) * BLOCK, device=x.device)
    return row.where(row < len(x), -1)


class Fp8DenseMLP(DenseMLP):
    def forward(self, x: Tensor, recorder: RoutingRecorder | None = None) -> Tensor:
        """x [..., H] -> [..., H]."""
        gate, up, down = self.gate_proj, self.up_proj, self.down_proj
        assert isinstance(gate, Fp8Linear)
        assert isinstance(up, Fp8Linear)
        if gate.out_features % BLOCK:  # a block would hold some of both, and kernels want whole ones
            return down(self.activate(*apply_linears(x, [gate, up])))
        y, _ = fp8_swiglu(x.reshape(-1, x.shape[-1]), gate.weight, up.weight, down.weight, gate.backend)
        return y.view(*x.shape[:-1], y.shape[-1])
