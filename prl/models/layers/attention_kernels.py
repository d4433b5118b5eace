"""Attention of packed queries against packed keys, as two plain functions: forward with the log-sum-exp of the scores,
and backward from a given output and log-sum-exp.

That is what ring attention needs: partial results over different keys are merged by their log-sum-exp, and the backward
of each part is computed from the merged result (arXiv:2310.01889). On CUDA in 16 bits both are the flash kernels behind
`torch.nn.attention.varlen` (FlashAttention-2, or whatever PyTorch's registry has activated), which take grouped heads
as they are; elsewhere they are written out in float32, documents of the same length at a time.

Shapes: q [Tq, Hq, D], k [Tk, Hkv, D], v [Tk, Hkv, V] with Hkv dividing Hq and V <= D; lse [Hq, Tq] float32. Document d
owns query rows cu_q[d]:cu_q[d+1] and key rows cu_k[d]:cu_k[d+1], int32 on the same device, none empty; max_q and max_k
are the longest. Of a causal document the last query sees all keys, each one before it one less (as many queries as
keys, or fewer). Scores are scaled by D ** -0.5.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import current_flash_attention_impl


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, causal: bool
) -> tuple[Tensor, Tensor]:
    """-> out [Tq, Hq, V] in q's dtype, lse [Hq, Tq]. No autograd."""
    if not _runs_flash(q):
        return _plain_forward(q, k, v, cu_q, cu_k, causal)
    # for max_q = 1 the kernel takes a decoding path, whose log-sum-exp comes back in another order
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, widened(v, width_of_values(q, v)), cu_q, cu_k, max(max_q, 2), max_k, 0.0, causal, False
    )
    return narrowed(out, v.shape[-1]), lse


def varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """-> dq, dk, dv like q, k, v: these keys' share of the gradient, where `out` and `lse` may be of more keys."""
    if not _runs_flash(q):
        return _plain_backward(dout, q, k, v, out, lse, cu_q, cu_k, causal)
    rng_state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout, which there is none of
    unused = torch.empty(0, device=q.device)
    width = width_of_values(q, v)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        widened(dout, width).contiguous(),
        q,
        k,
        widened(v, width),
        widened(out, width),
        lse,
        cu_q,
        cu_k,
        max_q,
        max_k,
        0.0,
        causal,
        rng_state,
        unused,
    )
    return dq, dk, narrowed(dv, v.shape[-1])


UNLIKE = {(192, 128)}  # widths of keys and values that FlashAttention 3 and 4 take as they are: latent attention's


def width_of_values(q: Tensor, v: Tensor) -> int:
    """As the kernels want them: as wide as keys, but for FlashAttention 3 and 4."""
    widths = (q.shape[-1], v.shape[-1])
    return widths[widths in UNLIKE and current_flash_attention_impl() in ("FA3", "FA4")]


def widened(x: Tensor, width: int) -> Tensor:
    """With zeros up to `width`, for kernels that want values as wide as keys."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def narrowed(x: Tensor, width: int) -> Tensor:
    """The first `width` numbers, in memory of their own."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


class PackedAttention(torch.autograd.Function):
    """Causal attention of packed documents, q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, V] -> [N, Hq, V].

    Not `torch.nn.attention.varlen.varlen_attn`: in torch 2.11 it refuses grouped heads, and its backward names a window
    to the kernels even where there is none, which FlashAttention 4 refuses.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        out, lse = varlen_forward(q, k, v, ends, ends, longest, longest, causal=True)
        ctx.save_for_backward(q, k, v, out, lse, ends)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, ends = ctx.saved_tensors
        q, k, v, out, lse = saved
        longest = ctx.longest
        return *varlen_backward(grads[0], q, k, v, out, lse, ends, ends, longest, longest, causal=True), None, None


def _runs_flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    compute = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    lse = torch.empty(q.shape[1], q.shape[0], dtype=compute, device=q.device)
    for q_rows, k_rows in _equal_documents(cu_q, cu_k):
        keys, values = k[k_rows].to(compute), v[k_rows].to(compute)  # [B, Sk, Hkv, D]
        scores = _scores(_grouped(q[q_rows], k.shape[1]).to(compute), keys, causal)
        part = scores.logsumexp(-1)  # [B, Hkv, G, Sq]
        attended = torch.einsum("bhgqk,bkhd->bqhgd", (scores - part[..., None]).exp(), values)
        out[q_rows] = attended.flatten(2, 3).to(q.dtype)
        lse[:, q_rows] = part.flatten(1, 2).transpose(0, 1)
    return out, lse


def _plain_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor, cu_k: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    compute = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    scale = q.shape[-1] ** -0.5
    for q_rows, k_rows in _equal_documents(cu_q, cu_k):
        queries, grad, result = (_grouped(t[q_rows], k.shape[1]).to(compute) for t in (q, dout, out))
        keys, values = k[k_rows].to(compute), v[k_rows].to(compute)
        part = lse[:, q_rows].unflatten(0, (k.shape[1], -1)).movedim(2, 0)  # [B, Hkv, G, Sq]
        probs = (_scores(queries, keys, causal) - part[..., None]).exp()
        delta = (grad * result).sum(-1).permute(0, 2, 3, 1)  # [B, Hkv, G, Sq]
        dscores = torch.einsum("bqhgd,bkhd->bhgqk", grad, values).sub_(delta[..., None]).mul_(probs).mul_(scale)
        dq[q_rows] = torch.einsum("bhgqk,bkhd->bqhgd", dscores, keys).flatten(2, 3).to(q.dtype)
        dk[k_rows] = torch.einsum("bhgqk,bqhgd->bkhd", dscores, queries).to(k.dtype)
        dv[k_rows] = torch.einsum("bhgqk,bqhgd->bkhd", probs, grad).to(v.dtype)
    return dq, dk, dv


def _equal_documents(cu_q: Tensor, cu_k: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Query rows [B, Sq] and key rows [B, Sk] of the documents of one shape, for every shape."""
    starts: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (q_start, q_end), (k_start, k_end) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        starts[q_end - q_start, k_end - k_start].append((q_start, k_start))
    for (q_len, k_len), documents in starts.items():
        first = torch.tensor(documents, device=cu_q.device)  # [B, 2]
        q_rows = first[:, :1] + torch.arange(q_len, device=cu_q.device)
        yield q_rows, first[:, 1:] + torch.arange(k_len, device=cu_q.device)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """[B, S, Hq, D] -> [B, S, Hkv, G, D]: query head h reads key head h // G."""
    return x.unflatten(2, (kv_heads, -1))


def _scores(queries: Tensor, keys: Tensor, causal: bool) -> Tensor:
    """queries [B, Sq, Hkv, G, D], keys [B, Sk, Hkv, D] -> [B, Hkv, G, Sq, Sk]."""
    scores = torch.einsum("bqhgd,bkhd->bhgqk", queries, keys) * queries.shape[-1] ** -0.5
    if not causal:
        return scores
    before = scores.shape[-1] - scores.shape[-2]  # keys that all queries see
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + before)
    return scores.masked_fill(future, float("-inf"))
