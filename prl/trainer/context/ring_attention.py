"""Context parallelism by passing keys and values around a ring (Ring Attention, arXiv:2310.01889), balanced.

Every document is padded to 2 * cp chunks, of which rank r owns chunks r and 2 * cp - 1 - r ("zigzag"): an early one
with few keys before it and a late one with many, so that all ranks have the same causal work whatever the documents.
Against the keys of rank s, rank r then computes one of three blocks per document:

    s = r   causal attention over its own two chunks, which lie in order
    s < r   all its queries against the early chunk of s, none masked; the late one comes after them all
    s > r   its late queries against both chunks of s, none masked; its early ones come before them all

While a block is computed the next keys arrive. In backward they go round once more, and their gradients with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from prl.models.layers.attention import Attend
from prl.models.layers.attention_kernels import varlen_backward, varlen_forward
from prl.trainer.context.group import ContextGroup, Passing, pass_on

KV_TAG, GRADIENT_TAG = 0, 1


def zigzag_positions(doc_lens: list[int], context: ContextGroup) -> tuple[Tensor, Tensor]:
    """Row position [n] and validity [n] of this rank's slots; padding repeats the last token of its document."""
    lengths = torch.tensor(doc_lens)
    document, offset, chunk = _slots(lengths, context.size)
    late = offset >= chunk
    number = torch.where(late, 2 * context.size - 1 - context.rank, context.rank)
    position = number * chunk + offset - late * chunk  # in its document
    length = lengths[document]
    starts = lengths.cumsum(0) - lengths
    return starts[document] + position.minimum(length - 1), position < length


def _slots(lengths: Tensor, cp: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every local slot [n]: its document, its offset in the local part of it, and the length of the chunks there."""
    chunks = -(-lengths // (2 * cp))
    document = torch.arange(len(lengths)).repeat_interleave(2 * chunks)
    starts = 2 * (chunks.cumsum(0) - chunks)
    return document, torch.arange(len(document)) - starts[document], chunks[document]


@dataclass(frozen=True)
class Layout:
    """Where the documents' chunks lie among this rank's slots; all on the device."""

    early: Tensor  # [n / 2] slots of the first chunks
    late: Tensor  # [n / 2] slots of the second chunks
    cu_chunk: Tensor  # [documents + 1] int32: where each document begins among the early, or the late, slots
    cu_both: Tensor  # [documents + 1] int32: and among all slots
    longest_chunk: int


@dataclass(frozen=True)
class Block:
    """Which local queries meet which keys of a source rank; None: all of them."""

    queries: Tensor | None
    keys: Tensor | None
    causal: bool


def zigzag_layout(doc_lens: list[int], cp: int, device: torch.device) -> Layout:
    lengths = torch.tensor(doc_lens)
    _, offset, chunk = _slots(lengths, cp)
    chunks = -(-lengths // (2 * cp))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), chunks.cumsum(0)]).to(torch.int32)
    early, late = ((mask.nonzero().squeeze(1)).to(device) for mask in (offset < chunk, offset >= chunk))
    return Layout(early, late, ends.to(device), 2 * ends.to(device), int(chunks.max()))


def ring_attention(doc_lens: list[int], context: ContextGroup, device: torch.device) -> Attend:
    """Causal attention inside each document over this rank's slots."""
    layout = zigzag_layout(doc_lens, context.size, device)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _RingAttention.apply(q, k, v, layout, context)

    return attend


def block_of(source: int, layout: Layout, context: ContextGroup) -> Block:
    if source == context.rank:
        return Block(None, None, causal=True)
    if source < context.rank:
        return Block(None, layout.early, causal=False)
    return Block(layout.late, None, causal=False)


def _bounds(block: Block, layout: Layout) -> tuple[Tensor, Tensor, int, int, bool]:
    """cu_q, cu_k, max_q, max_k, causal, as the kernels want them."""
    one, both = (layout.cu_chunk, layout.longest_chunk), (layout.cu_both, 2 * layout.longest_chunk)
    cu_q, max_q = both if block.queries is None else one
    cu_k, max_k = both if block.keys is None else one
    return cu_q, cu_k, max_q, max_k, block.causal


def _pick(x: Tensor, rows: Tensor | None, dim: int = 0) -> Tensor:
    return x if rows is None else x.index_select(dim, rows)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: Layout, context: ContextGroup) -> Tensor:
        out, lse = _ring_forward(q, k, v, layout, context)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.layout, ctx.context = layout, context
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        dq, dkv = _ring_backward(dout, q, k, v, out, lse, ctx.layout, ctx.context)
        dk, dv = dkv.split([k.shape[-1], v.shape[-1]], dim=-1)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _ring_forward(q: Tensor, k: Tensor, v: Tensor, layout: Layout, context: ContextGroup) -> tuple[Tensor, Tensor]:
    """-> out [n, Hq, V] in q's dtype, lse [Hq, n]. Two buffers of keys and values exist: one in use, one arriving."""
    kv = torch.cat((k, v), dim=-1)
    for step in range(context.size):
        passing = pass_on(kv, context, KV_TAG) if step + 1 < context.size else None
        block = block_of((context.rank - step) % context.size, layout, context)
        part, part_lse = _block_forward(q, kv, block, layout)
        if step == 0:  # every query has at least itself here, so lse is finite from now on
            out, lse = part.to(torch.promote_types(q.dtype, torch.float32)), part_lse
        else:
            _merge(out, lse, part, part_lse, block.queries)
        if passing is not None:
            kv, passing = passing.wait(), None
    return out.to(q.dtype), lse


def _block_forward(q: Tensor, kv: Tensor, block: Block, layout: Layout) -> tuple[Tensor, Tensor]:
    k, v = _keys_and_values(q, kv, block)
    return varlen_forward(_pick(q, block.queries), k, v, *_bounds(block, layout))


def _keys_and_values(q: Tensor, kv: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """q [n, Hq, D], kv [n, Hkv, D + V] -> the block's k [m, Hkv, D], v [m, Hkv, V]."""
    k, v = _pick(kv, block.keys).tensor_split([q.shape[-1]], dim=-1)
    return k, v


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor, rows: Tensor | None) -> None:
    """Put in place the attention over two sets of keys together, for the given rows.

    out = out * exp(lse - both) + part * exp(part_lse - both), where the factors add up to one.
    """
    old, old_lse = _pick(out, rows), _pick(lse, rows, dim=1)
    weight = (part_lse - old_lse).sigmoid().t().unsqueeze(-1)  # [rows, Hq, 1]
    old.lerp_(part.to(old.dtype), weight)
    both = torch.logaddexp(old_lse, part_lse)
    if rows is None:
        lse.copy_(both)
    else:
        out.index_copy_(0, rows, old)
        lse.index_copy_(1, rows, both)


def _ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, layout: Layout, context: ContextGroup
) -> tuple[Tensor, Tensor]:
    """-> dq [n, Hq, D], dkv [n, Hkv, D + V], in float32 (or wider).

    The gradient of a rank's keys follows them one step behind, collecting each rank's share, and takes one step more
    to come home.
    """
    kv = torch.cat((k, v), dim=-1)
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dkv = torch.zeros_like(q, dtype=wide), torch.zeros_like(kv, dtype=wide)
    homeward: Passing | None = None
    for step in range(context.size):
        passing = pass_on(kv, context, KV_TAG) if step + 1 < context.size else None
        block = block_of((context.rank - step) % context.size, layout, context)
        shares = _block_backward(dout, q, kv, out, lse, block, layout)
        if homeward is not None:
            dkv, homeward = homeward.wait(), None
        _collect(dq, dkv, shares, block)
        del shares
        homeward = pass_on(dkv, context, GRADIENT_TAG)
        if passing is not None:
            kv, passing = passing.wait(), None
    assert homeward is not None
    return dq, homeward.wait()


def _block_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, block: Block, layout: Layout
) -> tuple[Tensor, Tensor, Tensor]:
    queries, grad, result = (_pick(x, block.queries) for x in (q, dout, out))
    k, v = _keys_and_values(q, kv, block)
    return varlen_backward(grad, queries, k, v, result, _pick(lse, block.queries, dim=1), *_bounds(block, layout))


def _collect(dq: Tensor, dkv: Tensor, shares: tuple[Tensor, Tensor, Tensor], block: Block) -> None:
    rows = (block.queries, block.keys, block.keys)
    totals = (dq, *dkv.split([share.shape[-1] for share in shares[1:]], dim=-1))
    for total, share, picked in zip(totals, shares, rows, strict=True):
        if picked is None:
            total.add_(share)
        else:
            total.index_add_(0, picked, share.to(total.dtype))
