"""Context parallelism of latent attention: all ranks gather the latents, and keep their own queries.

What a token's keys and values of all heads are made from is short (576 numbers in DeepSeek-V3, where they are 40,960),
so ranks gather that, once a layer, and make keys and values themselves, for some heads at a time. Queries lie as the
ring's do, an early and a late chunk of every document on each rank: both see the document up to their own end, so that
all ranks have the same work. Heads need not be divided by the number of ranks. What it costs is that every rank
multiplies all latents by kv_b_proj, forward and again in backward.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.models.layers.attention import LatentAttend
from prl.models.layers.attention_kernels import varlen_backward, varlen_forward
from prl.trainer.context.gather import gather
from prl.trainer.context.group import ContextGroup

BLOCK_BYTES = 256 << 20  # of the keys and values that are in memory at once


class Chunks(NamedTuple):
    """Which queries meet which keys, as `varlen_forward` wants it."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


class GatheredLatentAttention(LatentAttend):
    """On the slots of `shard_row`. A collective: every rank of the group calls it for the same layers."""

    def __init__(self, doc_lens: list[int], context: ContextGroup, device: torch.device) -> None:
        self.context = context
        cp, rank = context.size, context.rank
        chunks = -(-torch.tensor(doc_lens) // (2 * cp))  # [documents] tokens of each of a document's 2 * cp chunks
        ends = torch.tensor([rank + 1, 2 * cp - rank])  # chunks that the early and the late queries see
        lengths = (chunks[:, None] * ends).flatten()
        queries = chunks.repeat_interleave(2)
        longest = int(queries.max()), int(lengths.max())
        self.bounds = Chunks(_ends(queries).to(device), _ends(lengths).to(device), *longest)
        slots = _slots_in_order(chunks, cp)
        starts = (2 * cp * (chunks.cumsum(0) - chunks)).repeat_interleave(2)  # of the documents in `slots`
        places = torch.arange(int(lengths.sum())) - (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
        self.keys = slots[starts.repeat_interleave(lengths) + places].to(device)

    def __call__(self, layer_idx: int, q: Tensor, latents: Tensor, of_keys: Tensor, of_values: Tensor) -> Tensor:
        rows = gather(latents, self.context).index_select(0, self.keys)
        return _LatentAttention.apply(q, rows, of_keys, of_values, self.bounds)


def _ends(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32)


def _slots_in_order(chunks: Tensor, cp: int) -> Tensor:
    """Of the padded documents' tokens in order, where they lie among the slots of all ranks, one after another."""
    per_rank = 2 * int(chunks.sum())
    number = torch.arange(2 * cp).repeat(len(chunks))  # of each chunk in its document
    rank, late = torch.where(number < cp, number, 2 * cp - 1 - number), number >= cp
    size = chunks.repeat_interleave(2 * cp)
    first = rank * per_rank + 2 * (chunks.cumsum(0) - chunks).repeat_interleave(2 * cp) + late * size
    inside = torch.arange(int(size.sum())) - (size.cumsum(0) - size).repeat_interleave(size)
    return first.repeat_interleave(size) + inside


class _LatentAttention(torch.autograd.Function):
    """q [n, H, D], rows [K, C + R], of_keys [H, D - R, C], of_values [H, V, C] -> [n, H, V]. Keys and values are made
    for some heads at a time, in backward again.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, rows: Tensor, of_keys: Tensor, of_values: Tensor, bounds: Chunks) -> Tensor:
        out, lses = q.new_empty(*q.shape[:2], of_values.shape[1]), []
        for heads in _blocks(q, rows, of_values):
            k, v = _expand(rows, of_keys[heads], of_values[heads])
            out[:, heads], lse = varlen_forward(q[:, heads].contiguous(), k, v, *bounds, True)
            lses.append(lse)
        ctx.save_for_backward(q, rows, of_keys, of_values, out, torch.cat(lses))
        ctx.bounds = bounds
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        bounds: Chunks = ctx.bounds
        q, rows, of_keys, of_values, out, lse = ctx.saved_tensors
        still, rank = of_keys.shape[1:]
        dq, dof_keys, dof_values = torch.empty_like(q), torch.empty_like(of_keys), torch.empty_like(of_values)
        drows = torch.zeros_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))
        for heads in _blocks(q, rows, of_values):
            k, v = _expand(rows, of_keys[heads], of_values[heads])
            grad, queries, result = (t[:, heads].contiguous() for t in (dout, q, out))
            dq[:, heads], dk, dv = varlen_backward(grad, queries, k, v, result, lse[heads], *bounds, True)
            drows[:, rank:] += dk[..., still:].sum(1, dtype=drows.dtype)
            both = torch.cat([dk[..., :still], dv], dim=2).flatten(1)  # [K, h * (D - R + V)]
            matrix = torch.cat([of_keys[heads], of_values[heads]], dim=1).flatten(0, 1)  # [h * (D - R + V), C]
            drows[:, :rank] += both @ matrix
            dmatrix = (both.t() @ rows[:, :rank]).unflatten(0, (-1, still + v.shape[2]))
            dof_keys[heads], dof_values[heads] = dmatrix.split([still, v.shape[2]], dim=1)
        return dq, drows.to(rows.dtype), dof_keys, dof_values, None


def _blocks(q: Tensor, rows: Tensor, of_values: Tensor) -> list[slice]:
    """Heads whose keys and values are made at once."""
    size = max(1, BLOCK_BYTES // (len(rows) * (q.shape[2] + of_values.shape[1]) * rows.element_size()))
    return [slice(first, min(first + size, q.shape[1])) for first in range(0, q.shape[1], size)]


def _expand(rows: Tensor, of_keys: Tensor, of_values: Tensor) -> tuple[Tensor, Tensor]:
    """rows [K, C + R] -> keys [K, h, D] and values [K, h, V] of some heads."""
    rank = of_keys.shape[2]
    latent, shared = rows.split([rank, rows.shape[1] - rank], dim=1)
    k, v = ((latent @ part.flatten(0, 1).t()).unflatten(1, part.shape[:2]) for part in (of_keys, of_values))
    return torch.cat([k, shared[:, None].expand(-1, k.shape[1], -1)], dim=2), v
