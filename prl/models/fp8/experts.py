"""Experts whose GEMMs are block-scaled, from the routed tokens to what goes back to them as one operation.

Every expert's rows begin at a multiple of 128 (`groups.py`), so that no block of 128 tokens crosses experts. The
activation is never written: forward casts it for the second GEMM, backward makes it again where the second weight's
gradient needs it, and the gradient of the first product leaves as e4m3 already. The host waits for nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from prl.models.experts.gradients import add_gradient, adds_up
from prl.models.experts.stacked import Casts, Early, Experts
from prl.models.fp8.activations import (
    cast_squared_relu,
    cast_squared_relu_backward,
    cast_swiglu,
    cast_swiglu_backward,
)
from prl.models.fp8.cast import cast, cast_blocks
from prl.models.fp8.format import BLOCK
from prl.models.fp8.gemm import Backend, multiply_group_columns, multiply_groups
from prl.models.fp8.groups import GroupedRows, group_rows
from prl.models.sharding import local_part


class ScaledExperts(torch.autograd.Function):
    """x [Mp, H] in `groups`, first [E, 2I, H], down [E, H, I], scale [Mp] -> down_e (silu(gate) * up * scale) [Mp, H];
    where there is no gate, first [E, I, H] and the squared ReLU.

    casts: of the weights. params: what the gradients of first and down are added to instead of being handed on
    (`adds_up`). It does not matter what lies in rows of padding of x, in the gradients neither; scale is finite there.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        down: Tensor,
        scale: Tensor,
        groups: GroupedRows,
        casts: Sequence[Casts],
        params: tuple[Tensor, Tensor] | None,
        backend: str,
    ) -> Tensor:
        gated = first.shape[1] == 2 * down.shape[2]
        rows, _ = cast([x], rows=True, columns=False, source=groups.source)
        hidden = multiply_groups(rows, casts[0].forward.take(), groups, x.dtype, backend)  # [Mp, 2I], or [Mp, I]
        activated = (cast_swiglu if gated else cast_squared_relu)(hidden, scale)
        ctx.args = groups, [each.backward for each in casts], params, backend, gated
        ctx.save_for_backward(x, first, down, scale, hidden)
        return multiply_groups(activated, casts[1].forward.take(), groups, x.dtype, backend)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, first, down, scale, hidden = ctx.saved_tensors
        groups, casts, params, backend, gated = ctx.args
        rows, columns = cast([grads[0]], rows=True, columns=True, source=groups.source)
        grad = multiply_groups(rows, casts[1].take(), groups, x.dtype, backend)  # [Mp, I]
        back = cast_swiglu_backward if gated else cast_squared_relu_backward
        rows, hidden_columns, activated, grad_scale = back(hidden, scale, grad)
        assert grad_scale is not None
        del hidden, grad
        multiply = functools.partial(multiply_group_columns, groups=groups, backend=backend)
        grad_first = grad_down = None
        if params is None:
            grad_down = multiply(columns, activated, dtype=down.dtype)
        else:
            made = columns, activated
            add_gradient(params[1], lambda so_far: multiply(*made, dtype=down.dtype, into=so_far))
        grad_x = multiply_groups(rows, casts[0].take(), groups, x.dtype, backend)
        _, columns = cast([x], rows=False, columns=True, source=groups.source)
        if params is None:
            grad_first = multiply(hidden_columns, columns, dtype=first.dtype)
        else:
            add_gradient(params[0], lambda so_far: multiply(hidden_columns, columns, dtype=first.dtype, into=so_far))
        return grad_x, grad_first, grad_down, grad_scale.to(scale.dtype), None, None, None, None


# --- the module -------------------------------------------------------------------------------------------------------


class Fp8Experts(Experts):
    """Experts whose GEMMs are block-scaled. Weights of a wider dtype than the tokens' are rounded to it as they are
    quantised, and their gradients are not rounded.
    """

    backend: Backend
    alignment = BLOCK

    def grouped_mlp(self, x: Tensor, counts: Tensor, scale: Tensor) -> Tensor:
        """x [Mp, H] sorted by the experts held here, each one's rows from a multiple of 128 on, counts [E_local], scale
        [Mp] -> [Mp, H], each row times its scale.
        """
        groups = group_rows(counts, len(x))
        first, down = local_part(self.first_proj), local_part(self.down_proj)
        casts = [
            early or self.casts_of(weight.detach(), x.dtype)
            for early, weight in zip(self.casts, (first, down), strict=True)
        ]
        params = self.first_proj, self.down_proj
        if all(adds_up(param, x) for param in params):
            return ScaledExperts.apply(x, first.detach(), down.detach(), scale, groups, casts, params, self.backend)
        return ScaledExperts.apply(x, first, down, scale, groups, casts, None, self.backend)

    def casts_of(self, weight: Tensor, dtype: torch.dtype) -> Casts:
        return Casts(*(Early(functools.partial(cast_blocks, weight, turned, dtype)) for turned in (False, True)))
