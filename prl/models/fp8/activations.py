"""Activations together with the casts of what they make, and their backward with the casts of what that makes: nothing
in between is ever written.
"""

from __future__ import annotations

from torch import Tensor

from prl.models.fp8.cast import cast, cast_columns, cast_rows, has_kernel
from prl.models.fp8.format import BLOCK, Scaled


def cast_swiglu(gate_up: Tensor, scale: Tensor | None) -> Scaled:
    """gate_up [Mp, 2I], scale [Mp] (None: 1) -> `cast_rows` of silu(gate) * up * scale [Mp, I] (arXiv:2002.05202)."""
    if has_kernel(gate_up) and gate_up.shape[1] % (2 * BLOCK) == 0:
        from prl.models.fp8 import expert_kernels

        return expert_kernels.cast_swiglu(gate_up, scale)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return cast_rows((gate * gate.sigmoid() * up * _column(scale)).to(gate_up.dtype))


def cast_swiglu_backward(
    gate_up: Tensor, scale: Tensor | None, grad: Tensor
) -> tuple[Scaled, Scaled, Scaled, Tensor | None]:
    """Of `cast_swiglu`, grad [Mp, I] being the gradient of its result: the gradient of gate_up [Mp, 2I] cast along rows
    and along columns, the result once more but cast along columns, and the gradient of scale [Mp] float32.
    """
    if has_kernel(grad):
        from prl.models.fp8 import expert_kernels

        return expert_kernels.cast_swiglu_backward(gate_up, scale, grad)
    dtype = grad.dtype
    gate, up = gate_up.float().chunk(2, dim=-1)
    sigmoid, factor, grad = gate.sigmoid(), _column(scale), grad.float()
    grad_gate = (grad * up * factor * sigmoid * (1 + gate * (1 - sigmoid))).to(dtype)
    grad_up = (grad * factor * gate * sigmoid).to(dtype)
    rows, columns = cast([grad_gate, grad_up], rows=True, columns=True)
    activated = cast_columns((gate * sigmoid * up * factor).to(dtype))
    return rows, columns, activated, None if scale is None else (grad * gate * sigmoid * up).sum(1)


def _column(scale: Tensor | None) -> Tensor | float:
    return 1.0 if scale is None else scale.float()[:, None]


def cast_squared_relu(up: Tensor, scale: Tensor) -> Scaled:
    """up [Mp, I], scale [Mp] -> `cast_rows` of relu(up) ** 2 * scale [Mp, I] (arXiv:2109.08668)."""
    return cast_rows((up.float().relu().square() * scale.float()[:, None]).to(up.dtype))


def cast_squared_relu_backward(up: Tensor, scale: Tensor, grad: Tensor) -> tuple[Scaled, Scaled, Scaled, Tensor]:
    """As `cast_swiglu_backward`, of `cast_squared_relu`."""
    dtype, positive, scale, grad = grad.dtype, up.float().relu(), scale.float()[:, None], grad.float()
    rows, columns = cast([(2 * grad * scale * positive).to(dtype)], rows=True, columns=True)
    activated = cast_columns((positive.square() * scale).to(dtype))
    return rows, columns, activated, (grad * positive.square()).sum(1)
