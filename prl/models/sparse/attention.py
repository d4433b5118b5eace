"""Attention of each query to keys of its own choice: all heads of a query to the same rows of one sequence of latents,
whose first C numbers are the values, too (the absorbed form of multi-head latent attention).

Shapes: q [N, H, C + R], latents [S, C + R], chosen [N, K] int32 (rows of latents; -1: none), out [N, H, C], lse [N, H]
float32: the natural logarithm of the sum of exponentials of the scores. On CUDA in 16 bits this is Triton; elsewhere it
is written out, queries in blocks, so that memory does not grow with N * K. The gradient of latents adds up rows that
many queries chose: with deterministic algorithms on (torch.use_deterministic_algorithms) in a fixed order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20  # of one block's gathered latents


def sparse_attention(q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> Tensor:
    """-> [N, H, C] with C = `values`; scores are multiplied by `scale`. Every query has chosen at least one key."""
    return _SparseAttention.apply(q, latents, chosen, values, scale)


class _SparseAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> Tensor:
        q, latents = q.contiguous(), latents.contiguous()
        if _runs_kernels(q, values):
            out, lse = _kernel_forward(q, latents, chosen, values, scale)
        else:
            out, lse = _plain_forward(q, latents, chosen, values, scale)
        ctx.save_for_backward(q, latents, chosen, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, latents, chosen, out, lse = ctx.saved_tensors
        dout = grads[0].contiguous()
        exactly = torch.are_deterministic_algorithms_enabled()
        if _runs_kernels(q, out.shape[2]):
            from prl.models.sparse.attention_kernels import backward

            dq, dlatents = backward(dout, q, latents, chosen, out, lse, ctx.scale, exactly)
        else:
            dq, dlatents = _plain_backward(dout, q, latents, chosen, out, lse, ctx.scale)
        return dq, dlatents.to(latents.dtype), None, None, None


def _runs_kernels(q: Tensor, values: int) -> bool:
    """Triton's blocks are powers of two, 16 at least, and here as wide as both parts of a latent."""
    narrow = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)
    return narrow and all(part >= 16 and part & (part - 1) == 0 for part in (values, q.shape[2] - values))


def _kernel_forward(q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> tuple[Tensor, Tensor]:
    from prl.models.sparse import attention_kernels, flashmla

    kernels = flashmla if flashmla.fits(q, values) else attention_kernels
    return kernels.forward(q, latents, chosen, values, scale)


def _blocks(q: Tensor, chosen: Tensor, width: int) -> Iterator[slice]:
    size = max(1, BLOCK_BYTES // (chosen.shape[1] * (width + q.shape[1]) * 4))
    return (slice(first, first + size) for first in range(0, len(q), size))


def _plain_forward(q: Tensor, latents: Tensor, chosen: Tensor, values: int, scale: float) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:2], values)
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    for part in _blocks(q, chosen, latents.shape[1]):
        keys = latents[chosen[part].clamp(min=0)].to(wide)  # [B, K, W]
        scores = _scores(q[part].to(wide), keys, chosen[part], scale)
        lse[part] = scores.logsumexp(-1)
        out[part] = ((scores - lse[part, :, None]).exp() @ keys[..., :values]).to(q.dtype)
    return out, lse


def _plain_backward(
    dout: Tensor, q: Tensor, latents: Tensor, chosen: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    wide, values = lse.dtype, out.shape[2]
    dq, dlatents = torch.empty_like(q), torch.zeros_like(latents, dtype=wide)
    for part in _blocks(q, chosen, latents.shape[1]):
        rows = chosen[part].clamp(min=0)
        keys, queries, grad = latents[rows].to(wide), q[part].to(wide), dout[part].to(wide)
        probs = (_scores(queries, keys, chosen[part], scale) - lse[part, :, None]).exp()  # [B, H, K]
        delta = (grad * out[part].to(wide)).sum(-1, keepdim=True)
        dscores = (grad @ keys[..., :values].transpose(1, 2)).sub_(delta).mul_(probs).mul_(scale)
        dq[part] = (dscores @ keys).to(q.dtype)
        dkeys = dscores.transpose(1, 2) @ queries  # [B, K, W]
        dkeys[..., :values] += probs.transpose(1, 2) @ grad
        dlatents.index_add_(0, rows.flatten(), dkeys.flatten(0, 1))  # of -1 nothing but zeros
    return dq, dlatents


def _scores(queries: Tensor, keys: Tensor, chosen: Tensor, scale: float) -> Tensor:
    """queries [B, H, W], keys [B, K, W] -> [B, H, K], -inf where nothing is chosen."""
    return (queries @ keys.transpose(1, 2)).mul_(scale).masked_fill_((chosen < 0)[:, None], float("-inf"))
