"""Forward and backward by hand, for float32 on CPUs: fewer passes over memory than autograd makes.

On GPUs torch.compile does that. A tiny model on a laptop is bound by such passes, by calls and by copies as much as by
matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def is_by_hand(x: Tensor) -> bool:
    """Whether functions here are to compute something of x: on a CPU, in float32, and not while it is compiled. Without
    gradients, too, so that an engine and a trainer round alike.
    """
    return x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()


class _Unrecorded:
    """The context of a forward pass that has no backward."""

    def save_for_backward(self, *_: Tensor) -> None:
        pass

    def __setattr__(self, *_: Any) -> None:
        pass


_UNRECORDED = _Unrecorded()


def by_hand(function: type[torch.autograd.Function], *inputs: Any) -> Tensor:
    """What `function.apply` gives; where nothing is recorded, without its overhead: 4 us a call, about 100 calls for
    each token of all sequences that an engine decodes.
    """
    found: Tensor = function.apply(*inputs) if torch.is_grad_enabled() else function.forward(_UNRECORDED, *inputs)
    return found


class RMSNormByHand(torch.autograd.Function):
    """x [..., D], weight [D], eps -> x / rms(x) * weight (arXiv:1910.07467)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        mean = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1])
        scale = mean.add_(eps).rsqrt_()
        normed = x * scale
        ctx.save_for_backward(normed, scale, weight)
        return normed * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        products = (grads[0] * normed).reshape(-1, len(weight))
        along = (products @ weight).view(scale.shape).div_(-len(weight))  # of the gradient, what lies along x
        d_x = (grads[0] * weight).addcmul_(normed, along).mul_(scale)
        return d_x, products.sum(0) if ctx.needs_input_grad[1] else None, None


class RotationByHand(torch.autograd.Function):
    """x [N, H, R], cos and sin [N, 1, R] with equal halves -> x, turned as `rotate` does; backward turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return turned(grads[0], cos, sin, -1), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, way: int) -> Tensor:
    """By the angle (way 1) or back (-1)."""
    half = x.shape[-1] // 2
    y = x * cos
    y[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-way)
    y[..., half:].addcmul_(x[..., :half], sin[..., half:], value=way)
    return y


class SwiGLUByHand(torch.autograd.Function):
    """x [M, 2I] of gates and what they let through, scale [M] -> silu(gate) * up * scale, [M, I]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        opened = torch.nn.functional.silu(gate)
        ctx.save_for_backward(x, opened, scale)
        return (opened * up).mul_(scale[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, opened, scale = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        d_x = torch.empty_like(x)
        d_gate, d_up = d_x.chunk(2, dim=-1)
        torch.mul(grads[0], opened, out=d_up)
        d_scale = torch.linalg.vecdot(d_up, up) if ctx.needs_input_grad[1] else None
        d_up.mul_(scale[:, None])
        d_opened = (grads[0] * up).mul_(scale[:, None])
        torch.ops.aten.silu_backward.grad_input(d_opened, gate, grad_input=d_gate)
        return d_x, d_scale


class GroupedLinearByHand(torch.autograd.Function):
    """x [M, K] in slices of so many rows, weight [E, N, K] -> [M, N]: slice e times weight[e]^T."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts
        y = x.new_empty(len(x), weight.shape[1])
        for rows, w, out in zip(x.split(counts), weight.unbind(), y.split(counts), strict=True):
            torch.mm(rows, w.t(), out=out)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        pieces = grads[0].split(ctx.counts)
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = torch.empty_like(x)
            for piece, w, out in zip(pieces, weight.unbind(), d_x.split(ctx.counts), strict=True):
                torch.mm(piece, w, out=out)
        if ctx.needs_input_grad[1]:
            d_weight = torch.empty_like(weight)
            for piece, rows, out in zip(pieces, x.split(ctx.counts), d_weight.unbind(), strict=True):
                torch.mm(piece.t(), rows, out=out)
        return d_x, d_weight, None


class Slots:
    """Where padded documents [B, S] have their tokens, of N: `taken` [B * S] for each slot, those behind a document's
    end its last token's again; `places` [M] for each of their M tokens; `tokens` [M].
    """

    def __init__(self, starts: Tensor, lengths: Tensor, place: Tensor | None = None) -> None:
        """First token and number of tokens of each document, [B]. With `place` [T] these are tokens of a row of which
        not all are run, and it says which of the N that are stands for each.
        """
        columns = torch.arange(int(lengths.max()))
        valid = columns < lengths[:, None]
        taken = starts[:, None] + columns.minimum(lengths[:, None] - 1)
        if place is not None:
            taken = place[taken]
        self.shape, self.taken = valid.shape, taken.flatten()
        self.places, self.tokens = valid.flatten().nonzero().flatten(), taken[valid]


class PaddedQueries:
    """Documents [B] of like length for `ShortAttentionByHand`: slots of their queries and of their keys, which are the
    same ones where nothing is shared; else each document's queries are its last, behind its first `shared` [B] tokens,
    and a token may be a key of many.
    """

    def __init__(
        self, starts: Tensor, lengths: Tensor, shared: Tensor | None = None, place: Tensor | None = None
    ) -> None:
        self.shared = shared
        if shared is None:
            self.queries = self.keys = Slots(starts, lengths)
            return
        self.queries = Slots(starts + shared, lengths - shared, place)
        self.keys = Slots(starts, lengths, place)
        assert place is not None
        order = self.keys.tokens.argsort(stable=True)
        self.of_tokens = self.keys.places[order]  # [M] the slots of the first token, of the second, ...
        self.begins = torch.searchsorted(self.keys.tokens[order], torch.arange(int(place.max()) + 1))  # [N] among them
        self.masks: dict[tuple[int, int], Tensor] = {}

    def seen(self) -> Tensor:
        """[B, Sq, Sk] bool: whether a query sees a key of its document."""
        first = 0 if self.shared is None else self.shared[:, None]
        queries = (first + torch.arange(self.queries.shape[1])).expand(self.queries.shape)
        return torch.arange(self.keys.shape[1]) <= queries[:, :, None]

    def as_indices(self) -> tuple[Tensor, ...]:
        """Tokens of the queries' slots [B, Sq] and of the keys' [B, Sk], `seen` [B, 1, Sq, Sk]; the slots of the M
        queries, and these.
        """
        queries, keys = (slots.taken.view(slots.shape) for slots in (self.queries, self.keys))
        return queries, keys, self.seen()[:, None], self.queries.places, self.queries.tokens

    def mask(self, q: Tensor, groups: int) -> Tensor:
        """What to add to scores of q [N, H, D]: [H / groups * Sq, Sk], or [B * groups, H / groups * Sq, Sk]."""
        (count, new), length, repeats = self.queries.shape, self.keys.shape[1], q.shape[1] // groups
        if self.shared is None:
            return q.new_full((new, length), -torch.inf).triu_(1).repeat(repeats, 1)
        if (repeats, groups) not in self.masks:  # all layers have the same
            seen = self.seen()
            each = q.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)
            wide = each[:, None, None].expand(-1, groups, repeats, -1, -1)
            self.masks[repeats, groups] = wide.reshape(count * groups, repeats * new, length)
        return self.masks[repeats, groups]

    def add_to_keys(self, y: Tensor, out: Tensor) -> None:
        """y [B * groups, H / groups * Sk, D], gradients of the keys' slots, into those of the tokens, out [N, H, D]:
        zeros, or what other documents gave them.
        """
        if self.shared is None:
            from_kv_head(y, self.keys, out)
            return
        padded = to_slots(y, self.keys, out.shape[1])
        sums = torch.nn.functional.embedding_bag(self.of_tokens, padded, self.begins, mode="sum")
        out.view(len(out), -1).add_(sums)


class ShortAttentionByHand(torch.autograd.Function):
    """q [N, Hq, D], k and v [N, Hkv, D] -> [N, Hq, D]: causal attention within documents so short that the
    probabilities of all their pairs, which are kept, are no more than their hidden states.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, classes: list[PaddedQueries]) -> Tensor:
        ctx.classes, ctx.shapes, kept, out = classes, (q.shape, k.shape), [], q.new_empty(q.shape)
        for padded in classes:
            pq = by_kv_head(q, padded.queries, k.shape[1])
            pk, pv = (by_kv_head(y, padded.keys, k.shape[1]) for y in (k, v))
            later = padded.mask(q, k.shape[1])
            probs = torch.baddbmm(later, pq, pk.mT, alpha=q.shape[-1] ** -0.5).softmax(dim=-1)
            from_kv_head(torch.bmm(probs, pv), padded.queries, out)
            kept += [pq, pk, pv, probs]
        ctx.save_for_backward(*kept)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (of_q, of_k), scale = ctx.shapes, ctx.shapes[0][-1] ** -0.5
        added = any(padded.shared is not None for padded in ctx.classes)
        d_q = grads[0].new_empty(of_q)
        d_k, d_v = ((grads[0].new_zeros if added else grads[0].new_empty)(of_k) for _ in "kv")
        kept = iter(ctx.saved_tensors)
        for padded, pq, pk, pv, probs in zip(ctx.classes, kept, kept, kept, kept, strict=True):
            grad = by_kv_head(grads[0], padded.queries, of_k[1], own_only=True)
            padded.add_to_keys(torch.bmm(probs.mT, grad), d_v)
            d_scores = torch._softmax_backward_data(torch.bmm(grad, pv.mT), probs, -1, probs.dtype).mul_(scale)
            from_kv_head(torch.bmm(d_scores, pk), padded.queries, d_q)
            padded.add_to_keys(torch.bmm(d_scores.mT, pq), d_k)
        return d_q, d_k, d_v, None


def by_kv_head(x: Tensor, slots: Slots, groups: int, own_only: bool = False) -> Tensor:
    """x [N, H, D] -> [B * groups, H / groups * S, D]. own_only: zeros behind a document's end."""
    (count, length), flat = slots.shape, x.flatten(1)
    if own_only:
        own = flat.index_select(0, slots.tokens)
        padded = flat.new_zeros(count * length, flat.shape[1]).index_copy_(0, slots.places, own)
    else:
        padded = flat.index_select(0, slots.taken)
    heads = padded.view(count, length, groups, -1, x.shape[-1]).permute(0, 2, 3, 1, 4)
    return heads.reshape(count * groups, -1, x.shape[-1])


def from_kv_head(y: Tensor, slots: Slots, out: Tensor) -> None:
    """The way back: y [B * groups, H / groups * S, D] into the documents' own rows of out [N, H, D]."""
    out.view(len(out), -1).index_copy_(0, slots.tokens, to_slots(y, slots, out.shape[1]).index_select(0, slots.places))


def to_slots(y: Tensor, slots: Slots, heads: int) -> Tensor:
    """y [B * groups, H / groups * S, D] -> [B * S, H * D]."""
    count, length = slots.shape
    return y.view(count, heads, length, -1).transpose(1, 2).reshape(count * length, -1)
