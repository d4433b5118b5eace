"""Training with block-scaled FP8 GEMMs (DeepSeek-V3, arXiv:2412.19437): linears; `dense.py` has MLPs, and
`experts.py` grouped experts.

Forward, input gradient and weight gradient all multiply e4m3 values; master weights, gradients, accumulation and what
happens between the GEMMs stay as they were. Embeddings, LM head, router and norms are left alone. Weights are cast anew
in each forward and backward pass, because sharded training holds them whole only then, and values kept from forward to
backward would be another copy of the model (which one rank by itself keeps, in bfloat16: `prl/trainer`). Activations
are saved in bfloat16 and cast along tokens in backward.

Linears that read the same input are one operation: it is cast once, and their input gradients are one GEMM.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from prl.models.fp8.cast import cast, cast_blocks, cast_columns, cast_rows, join_blocks
from prl.models.fp8.gemm import Backend, multiply, multiply_columns
from prl.models.layers.attention import Attention

# names of modules that stay as they are: "gate" is the router; a latent and a turned key are no whole blocks; what
# indexers score by decides, and so do the steps that `in_proj` of state-space layers makes, whose errors add up
KEPT = ("embed_tokens", "lm_head", "gate", "kv_a_proj_with_mqa", "wq_b", "wk", "weights_proj", "in_proj")


# --- operations -------------------------------------------------------------------------------------------------------


@torch.library.custom_op("prl::fp8_linears", mutates_args=())
def fp8_linears(x: Tensor, weights: list[Tensor], backend: str) -> list[Tensor]:
    """x [T, K], weights [N_i, K] -> x weight^T [T, N_i] in x's dtype."""
    rows = cast_rows(x)
    return [multiply(rows, cast_blocks(weight), x.dtype, backend) for weight in weights]


@fp8_linears.register_fake
def _(x: Tensor, weights: list[Tensor], backend: str) -> list[Tensor]:
    return [x.new_empty(x.shape[0], weight.shape[0]) for weight in weights]


@torch.library.custom_op("prl::fp8_linears_backward", mutates_args=())
def fp8_linears_backward(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], backend: str, wants_x: bool, wants_weights: bool
) -> list[Tensor]:
    """grads [T, N_i] -> gradients of x [T, K] and of the weights, joined [sum of N_i, K]; empty where not wanted."""
    rows, columns = cast(grads, wants_x, wants_weights)
    grad_x, joined = x.new_empty(0), x.new_empty(0)
    if wants_x:
        grad_x = multiply(rows, join_blocks(weights, transposed=True), x.dtype, backend)
    if wants_weights:
        joined = multiply_columns(columns, cast_columns(x), x.dtype, backend)
    return [grad_x, joined]


@fp8_linears_backward.register_fake
def _(
    grads: list[Tensor], x: Tensor, weights: list[Tensor], backend: str, wants_x: bool, wants_weights: bool
) -> list[Tensor]:
    height = sum(weight.shape[0] for weight in weights)
    return [x.new_empty(x.shape if wants_x else 0), x.new_empty((height, x.shape[1]) if wants_weights else 0)]


def _save_inputs(ctx: Any, inputs: tuple[Tensor, list[Tensor], str], output: list[Tensor]) -> None:
    x, weights, ctx.backend = inputs
    ctx.wants_weights = [weight.requires_grad for weight in weights]
    ctx.save_for_backward(x, *weights)


def _linears_backward(ctx: Any, grads: list[Tensor]) -> tuple[Tensor | None, list[Tensor | None], None]:
    x, *weights = ctx.saved_tensors
    wants_x, wanted = ctx.needs_input_grad[0], ctx.wants_weights
    grad_x, joined = fp8_linears_backward(list(grads), x, weights, ctx.backend, wants_x, any(wanted))
    parts = joined.split([len(weight) for weight in weights]) if any(wanted) else [None] * len(weights)
    kept = [part if wants else None for part, wants in zip(parts, wanted, strict=True)]
    return grad_x if wants_x else None, kept, None


fp8_linears.register_autograd(_linears_backward, setup_context=_save_inputs)


# --- modules ----------------------------------------------------------------------------------------------------------


class Fp8Linear(nn.Linear):
    """A linear layer whose three GEMMs are block-scaled. Takes over the parameters of the one that it replaces."""

    def __init__(self, linear: nn.Linear, backend: Backend) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.backend = linear.in_features, linear.out_features, backend
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]."""
        return apply_linears(x, [self])[0]


def apply_linears(x: Tensor, linears: Sequence[Fp8Linear]) -> list[Tensor]:
    """x [..., K] -> what each linear makes of it, [..., N_i]."""
    weights = [linear.weight for linear in linears]
    products = fp8_linears(x.reshape(-1, x.shape[-1]), weights, linears[0].backend)
    results = [y.view(*x.shape[:-1], y.shape[-1]) for y in products]
    return [y if linear.bias is None else y + linear.bias for y, linear in zip(results, linears, strict=True)]


class Fp8Attention(Attention):
    """q, k and v from one operation."""

    def multiply(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = apply_linears(x, [self.q_proj, self.k_proj, self.v_proj])  # type: ignore[list-item]
        return q, k, v
