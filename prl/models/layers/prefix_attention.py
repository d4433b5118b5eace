"""Attention of packed documents that begin alike, over the tokens that are run (`SharedPrefixes`).

Each document's own tokens are queries; its keys are all of its tokens, wherever in the row they are run. What is kept
for backward is what is run: keys are gathered again there, and the gradients that documents give a key are added up in
float32 in one order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.models.by_hand import PaddedQueries, ShortAttentionByHand, by_hand, is_by_hand
from prl.models.device import to_device
from prl.models.layers.attention import Attend
from prl.models.layers.attention_kernels import varlen_backward, varlen_forward, widened
from prl.models.layers.cudnn_attention import LONG_DOCUMENT, Kept, cudnn_backward, cudnn_forward, rounded
from prl.models.layers.shared_prefixes import SharedPrefixes

LONGEST = 4096  # tokens of a document whose pairs of a query and a key may each have a byte that says what is seen
FLASH_SPEED = 0.5  # of the built-in flash kernels on Hopper, as a part of cuDNN's


def flash_attention_with_prefixes(prefixes: SharedPrefixes, device: torch.device, cudnn: bool) -> Attend:
    """On a GPU in 16 bits: by varlen attention, with as many queries as a document has tokens of its own. With `cudnn`
    a long document that shares little is attended to whole, by cuDNN's kernels, which know no such queries.
    """
    plan = PrefixPlan(prefixes, device, cudnn)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return PrefixAttention.apply(q, k, v, plan)

    return attend


@dataclass(frozen=True)
class WholeDocuments:
    """B documents that are padded to the same S tokens, behind which causality keeps what repeats the last one."""

    tokens: Tensor  # [B, S] int64: where each token is run
    rows: Tensor  # [n] int64: of what is run, their own tokens
    slots: Tensor  # [n] int64: and where these are in the B * S

    @classmethod
    def build(cls, documents: list[tuple[Tensor, int]], size: int) -> WholeDocuments:
        """Of each document where its tokens are run [L], and how many of these are not its own."""
        tokens = torch.stack([torch.cat([of, of[-1:].expand(size - len(of))]) for of, _ in documents])
        rows = torch.cat([of[common:] for of, common in documents])
        slots = torch.cat([torch.arange(common, len(of)) + i * size for i, (of, common) in enumerate(documents)])
        return cls(tokens, rows, slots)

    def to(self, device: torch.device) -> WholeDocuments:
        return WholeDocuments(*(to_device(x, device) for x in (self.tokens, self.rows, self.slots)))


class PrefixPlan:
    """Which documents are attended to how, and the rows that they read of the N that are run."""

    def __init__(self, prefixes: SharedPrefixes, device: torch.device, cudnn: bool = False) -> None:
        queries: list[Tensor] = []
        keys: list[Tensor] = []
        whole: dict[int, list[tuple[Tensor, int]]] = defaultdict(list)
        for start, length, common in prefixes.documents():
            tokens = prefixes.place[start : start + length]
            if cudnn and faster_whole(length, common):
                whole[rounded(length)].append((tokens, common))
            else:
                queries.append(tokens[common:])
                keys.append(tokens)
        batches = [WholeDocuments.build(whole[size], size) for size in sorted(whole)]
        self.whole = [batch.to(device) for batch in batches]
        # rows of the queries and keys that varlen attention takes; None: all of them, and nothing
        self.queries = to_device(torch.cat(queries), device) if queries and whole else None
        self.keys = to_device(torch.cat(keys), device) if keys else None
        (self.ends_q, self.longest_q), (self.ends_k, self.longest_k) = (
            (ends_of([len(one) for one in of], device), max(map(len, of), default=0)) for of in (queries, keys)
        )
        # of all keys that anything reads, those of the first row that is run, of the second, ...
        read = torch.cat([*keys, *(batch.tokens.flatten() for batch in batches)])
        order = read.argsort(stable=True)
        self.order = to_device(order, device)
        begins = torch.searchsorted(read[order], torch.arange(len(prefixes.run) + 1))  # [N + 1]
        self.begins = to_device(begins, device)

    def varlen(self) -> tuple[Tensor, Tensor, int, int, bool]:
        return self.ends_q, self.ends_k, self.longest_q, self.longest_k, True

    def to_rows(self, parts: list[Tensor]) -> Tensor:
        """Gradients of all keys [M, H, D], in the order in which they were read -> of the rows that are run [N, H, D]:
        sums in float32.
        """
        read = torch.cat(parts) if len(parts) > 1 else parts[0]
        if read.is_cuda:
            from prl.models.experts.row_kernels import segment_sum

            return segment_sum(read.flatten(1), self.order, self.begins).view(-1, *read.shape[1:])
        wide = torch.promote_types(read.dtype, torch.float32)
        sums = F.embedding_bag(self.order, read.flatten(1).to(wide), self.begins[:-1], mode="sum")
        return sums.to(read.dtype).view(-1, *read.shape[1:])


def faster_whole(length: int, common: int) -> bool:
    """Whether cuDNN over all of a document's pairs takes less time than flash kernels over those of its own queries."""
    pairs = length**2 / 2
    return length >= LONG_DOCUMENT and pairs * FLASH_SPEED < pairs - common**2 / 2


def ends_of(lengths: list[int], device: torch.device) -> Tensor:
    """[D + 1] int32: where each document begins, and the last one ends."""
    return to_device(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), device)


class PrefixAttention(torch.autograd.Function):
    """q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, V] of the tokens that are run -> [N, Hq, V]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: PrefixPlan) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        statistics: list[Tensor] = []
        ctx.others = []
        if plan.keys is not None:
            part, lse = varlen_forward(_rows(q, plan.queries), k[plan.keys], v[plan.keys], *plan.varlen())
            statistics.append(lse)
            if plan.queries is None:
                out = part
            else:
                out[plan.queries] = part
        for documents in plan.whole:
            part, kept = cudnn_forward(*(x[documents.tokens] for x in (q, k, v)))
            out[documents.rows] = part.flatten(0, 1)[documents.slots]
            statistics.append(kept.lse)
            ctx.others.append(kept.others)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, out, *statistics)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, *statistics = ctx.saved_tensors
        plan, dout = ctx.plan, grads[0].contiguous()
        dq, dk, dv = torch.empty_like(q), [], []
        if plan.keys is not None:
            dpart, queries, result = (_rows(x, plan.queries) for x in (dout, q, out))
            lse, keys, values = statistics.pop(0), k[plan.keys], v[plan.keys]
            dqs, dks, dvs = varlen_backward(dpart, queries, keys, values, result, lse, *plan.varlen())
            dk.append(dks)
            dv.append(dvs)
            if plan.queries is None:
                dq = dqs
            else:
                dq[plan.queries] = dqs
        for documents, lse, others in zip(plan.whole, statistics, ctx.others, strict=True):
            queries, keys, values, result = (x[documents.tokens] for x in (q, k, v, out))
            dpart = torch.zeros_like(result)  # of what is run elsewhere, and of padding, no gradient comes from here
            dpart.view(-1, *dout.shape[1:])[documents.slots] = dout[documents.rows]
            dqs, dks, dvs = cudnn_backward(dpart, queries, keys, values, result, Kept(lse, others))
            dq[documents.rows] = dqs.flatten(0, 1)[documents.slots]
            dk.append(dks.flatten(0, 1))
            dv.append(dvs.flatten(0, 1))
        return dq, plan.to_rows(dk), plan.to_rows(dv), None


def _rows(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[index]


def padded_attention_with_prefixes(
    prefixes: SharedPrefixes, device: torch.device, by_hand_tokens: int, whole: Callable[[list[int]], Attend]
) -> Attend:
    """Elsewhere: queries and keys in right-padded batches, with a mask of what is seen. Longer documents than LONGEST
    are attended to by what `whole` makes of their lengths; on a CPU, where none is longer than `by_hand_tokens`,
    backward is written by hand.
    """
    classes: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
    long: list[tuple[int, int, int]] = []
    for start, length, common in prefixes.documents():
        if length > LONGEST:
            long.append((start, length, common))
        else:
            classes[length_class(length - common), length_class(length)].append((start, length, common))
    padded = []
    for key in sorted(classes):
        starts, lengths, shared = torch.tensor(classes[key]).unbind(1)
        padded.append(PaddedQueries(starts, lengths, shared, prefixes.place))
    is_short = device.type == "cpu" and max(prefixes.doc_lens) <= by_hand_tokens
    on_device: list[tuple[Tensor, ...]] = []  # per class: slots of queries and of keys, mask; places and tokens
    of_long: list[tuple[Attend, Tensor, Tensor, Tensor]] = []  # rows that are read, own ones in these, and in the row

    def prepare() -> None:
        on_device.extend(tuple(part.to(device) for part in c.as_indices()) for c in padded)
        if long:
            read = torch.cat([prefixes.place[start : start + length] for start, length, _ in long])
            own = torch.cat([torch.arange(length) >= common for _, length, common in long])
            attend_whole = whole([length for _, length, _ in long])
            of_long.append((attend_whole, read.to(device), own.to(device), read[own].to(device)))

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if is_short and is_by_hand(q) and v.shape == k.shape:
            return by_hand(ShortAttentionByHand, q, k, v, padded)
        if not on_device and not of_long:
            prepare()
        values, outs, tokens = widened(v, q.shape[-1]), [], []
        for of_queries, of_keys, seen, places, own in on_device:
            qc, kc, vc = (t[i].transpose(1, 2) for t, i in ((q, of_queries), (k, of_keys), (values, of_keys)))
            out = F.scaled_dot_product_attention(qc, kc, vc, attn_mask=seen, enable_gqa=q.shape[1] != k.shape[1])
            outs.append(out[..., : v.shape[-1]].transpose(1, 2).flatten(0, 1)[places])
            tokens.append(own)
        for attend_whole, read, own, rows in of_long:
            outs.append(attend_whole(layer_idx, *(x[read] for x in (q, k, v)))[own])
            tokens.append(rows)
        return torch.cat(outs)[torch.cat(tokens).argsort()]

    return attend


def length_class(length: int) -> int:
    """Documents of one class are padded to the longest of them: at most twice as long as each, or 16 tokens."""
    return max(length - 1, 15).bit_length()
