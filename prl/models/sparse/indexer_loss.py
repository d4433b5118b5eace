"""What indexers learn from: the attention's own distribution over the keys that they chose (DeepSeek-V3.2,
arXiv:2512.02556, section 2.1.1, the sparse stage).

For a query the target is the mean of its heads' probabilities, the prediction the softmax of the index scores, both
over the chosen keys, and the loss KL(target || prediction). No gradient of it leaves the indexer: what it is made from
is detached, and attention's own gradient passes through as if nothing were here. All is worked out in backward, queries
in blocks, keys gathered, added up in float32; nothing is kept but what attention keeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_BYTES = 512 << 20  # of a block's gathered latents and index keys in float32


class Index(NamedTuple):
    """What an indexer makes: queries [N, J, D], their weights [N, J] and keys [S, D]."""

    q: Tensor
    weights: Tensor
    k: Tensor


@dataclass
class IndexerLoss:
    """Of one micro-batch: which queries count, and by how much; and what was found."""

    rows: Tensor  # [M] int64 queries; one that is run for several documents may be there for each
    weight: float  # of each query's divergence in the loss
    total: Tensor  # [] float64: divergences added up, in nats, over queries and layers


def with_indexer_loss(
    out: Tensor, index: Index, attention: tuple[Tensor, Tensor, Tensor, float], loss: IndexerLoss
) -> Tensor:
    """out [N, H, C] as it is; in its backward the gradient of the loss reaches `index`.

    attention: q [N, H, W], latents [S, W], chosen [N, K] and scale, as of `sparse_attention`.
    """
    q, latents, chosen, scale = attention
    return _Attached.apply(out, *index, q.detach(), latents.detach(), chosen, scale, loss)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, out: Tensor, index_q: Tensor, index_weights: Tensor, index_k: Tensor, q: Tensor, latents: Tensor,
        chosen: Tensor, scale: float, loss: IndexerLoss,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(index_q, index_weights, index_k, q, latents, chosen)
        ctx.scale, ctx.loss = scale, loss
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        index_q, index_weights, index_k, q, latents, chosen = ctx.saved_tensors
        gradients = index_gradients(Index(index_q, index_weights, index_k), q, latents, chosen, ctx.scale, ctx.loss)
        return (grad, *gradients, *[None] * 5)


def index_gradients(
    index: Index, q: Tensor, latents: Tensor, chosen: Tensor, scale: float, loss: IndexerLoss
) -> tuple[Tensor, Tensor, Tensor]:
    """Of the weighted divergences of `loss.rows`, for the three parts of `index`; their sum goes to `loss.total`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dweights = torch.zeros_like(index.q), torch.zeros_like(index.weights)
    dk = torch.zeros_like(index.k, dtype=wide)
    size = max(1, BLOCK_BYTES // (chosen.shape[1] * (latents.shape[1] + index.k.shape[1] + 2 * q.shape[1]) * 4))
    for rows in loss.rows.split(size):
        places = chosen[rows]
        absent, places = places < 0, places.clamp(min=0)
        target = _target(q[rows], latents[places], absent, scale)  # [B, K]
        keys, queries, weights = index.k[places], index.q[rows], index.weights[rows].to(wide)
        dots = _product(queries, keys.transpose(1, 2)).relu_()  # [B, J, K]
        scores = (weights[:, None] @ dots).squeeze(1).masked_fill_(absent, float("-inf"))
        predicted = scores.log_softmax(-1)
        loss.total += (target * (target.clamp(min=1e-30).log() - predicted.masked_fill(absent, 0.0))).sum().double()
        dscores = (predicted.exp() - target).mul_(loss.weight)  # [B, K]
        dweights.index_add_(0, rows, (dots @ dscores[..., None]).squeeze(-1).to(dweights.dtype))
        ddots = (dscores[:, None] * weights[..., None]).masked_fill_(dots == 0, 0.0).to(keys.dtype)
        dq.index_add_(0, rows, _product(ddots, keys).to(dq.dtype))
        dk.index_add_(0, places.flatten(), _product(ddots.transpose(1, 2), queries).flatten(0, 1))
    return dq, dweights, dk.to(index.k.dtype)


def _target(queries: Tensor, keys: Tensor, absent: Tensor, scale: float) -> Tensor:
    """queries [B, H, W], keys [B, K, W], absent [B, K] -> the mean of the heads' probabilities [B, K]."""
    scores = _product(queries, keys.transpose(1, 2)).mul_(scale).masked_fill_(absent[:, None], float("-inf"))
    return scores.softmax(-1).mean(1)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of [B, M, N] and [B, N, K], in float32 at least; on GPUs of numbers as they are, in 16 bits."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(a, b, out_dtype=torch.float32)
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) @ b.to(wide)
