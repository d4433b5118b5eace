"""The state-space recurrence of Mamba-2 (arXiv:2405.21060), in matrix products over chunks.

A head carries a state S [P, S] from token to token: S = exp(dt * a) * S + dt * x B^T, and says y = S C + D x. Inside a
chunk that is attention without a softmax, whose scores C B^T fade with what lies between; between chunks states are
passed on (section 6 of the paper). Rows are worked through in blocks of chunks: what backward needs of a block, which
is quadratic in the chunk, is made again from the state that it began with.

Written out, all of it is in float32 or wider: decays are products of many factors close to one. In 16 bits on CUDA this
is Triton (`scan_kernels.py`), whose products are of 16-bit numbers and whose decays, sums and states are float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 64  # tokens whose scores are written out: its square is what a head of a chunk costs
BLOCK = 2048  # tokens whose chunks are in memory at once; a multiple of CHUNK


def scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None = None,
    state: Tensor | None = None,
    chunk: int = CHUNK,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Rows of T tokens, in each of which a state may be forgotten at any token.

    Args:
        x: [R, T, H, P].
        dt: step sizes [R, T, H], at least 0, float32 or wider. A token whose step is 0 leaves the state as it is.
        a: rates of decay [H], negative, of dt's dtype.
        b: [R, T, G, S], of groups of H / G neighbouring heads.
        c: [R, T, G, S].
        d: [H], of dt's dtype: what goes from x to y past the state.
        starts: [R, T] bool: tokens before which the state is forgotten, the first of each document. None: no token.
        state: [R, H, P, S], before the first token; zeros if None.

    Returns:
        y [R, T, H, P] in x's dtype, and the state after the last token [R, H, P, S] in dt's dtype.
    """
    rows, tokens, heads, size = x.shape
    if state is None:
        state = dt.new_zeros(rows, heads, size, b.shape[-1])
    if starts is None:
        starts = torch.zeros(rows, tokens, dtype=torch.bool, device=x.device)
    state, document = state.to(dt.dtype), starts.cumsum(1, dtype=torch.int32)
    if _runs_kernels(x, b, dt):
        return _KernelScan.apply(x, dt, a, b, c, d, state, document)
    return written_out(x, dt, a, b, c, d, state, document, chunk, block)


def written_out(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, document: Tensor,
    chunk: int = CHUNK, block: int = BLOCK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `scan`, without kernels. document [R, T] counts documents; the state that comes in belongs to number 0."""
    tokens = x.shape[1]
    padding = -tokens % chunk
    if padding:  # tokens without a step
        x, b, c = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, b, c))
        dt = F.pad(dt, (0, 0, 0, padding))
        document = torch.cat([document, document[:, -1:].expand(-1, padding)], dim=1)
    y, state = _Scan.apply(x, dt, a, b, c, d, state, document, chunk, block)
    return y[:, :tokens], state


def step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """One token of each row: x [R, H, P], dt [R, H], b and c [R, G, S], and the rest as of `scan`."""
    wide, repeats = dt.dtype, x.shape[1] // b.shape[1]
    b, c = (t.to(wide).repeat_interleave(repeats, dim=1) for t in (b, c))  # [R, H, S]
    taken = (x.to(wide) * dt[..., None])[..., None] * b[:, :, None]  # [R, H, P, S]
    state = (dt * a).exp()[..., None, None] * state + taken
    y = (state @ c[..., None]).squeeze(-1) + d[:, None] * x.to(wide)
    return y.to(x.dtype), state


def _runs_kernels(x: Tensor, b: Tensor, dt: Tensor) -> bool:
    if not x.is_cuda or dt.dtype != torch.float32:
        return False
    from prl.models.state_space.scan_kernels import fits

    return fits(x, b)


class _KernelScan(torch.autograd.Function):
    """As `_Scan`. Backward makes the states of all chunks again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, document: Tensor
    ) -> tuple[Tensor, Tensor]:
        from prl.models.state_space.scan_kernels import forward

        dt, a, d = dt.contiguous(), a.contiguous(), d.contiguous()
        ctx.save_for_backward(x, dt, a, b, c, d, state, document)
        return forward(x, dt, a, b, c, d, state, document)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from prl.models.state_space.scan_kernels import backward

        return (*backward(*grads, *ctx.saved_tensors), None)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, document: Tensor,
        chunk: int, block: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        y, entering = torch.empty_like(x), []
        for span in _spans(x, block):
            entering.append(state)
            before = _document_before(document, span)
            part, state = _scan_block(
                x[:, span], dt[:, span], a, b[:, span], c[:, span], d, state, document[:, span], before, chunk
            )
            y[:, span] = part
        ctx.save_for_backward(x, dt, a, b, c, d, torch.stack(entering), document)
        ctx.chunk, ctx.block = chunk, block
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d, entering, document = ctx.saved_tensors
        grad_y, grad_state = grads
        totals = [torch.zeros_like(t) for t in (x, dt, a, b, c, d)]
        for i, span in reversed(list(enumerate(_spans(x, ctx.block)))):
            before = _document_before(document, span)
            parts = [x[:, span], dt[:, span], a, b[:, span], c[:, span], d, entering[i]]
            with torch.enable_grad():
                x_, dt_, a_, b_, c_, d_, state_ = parts = [part.detach().requires_grad_() for part in parts]
                outputs = _scan_block(x_, dt_, a_, b_, c_, d_, state_, document[:, span], before, ctx.chunk)
            *shares, grad_state = torch.autograd.grad(outputs, parts, (grad_y[:, span], grad_state))
            for total, share in zip(totals, shares, strict=True):
                if total.dim() == 1:  # of all tokens
                    total += share
                else:
                    total[:, span] = share
        return (*totals, grad_state, None, None, None)


def _spans(x: Tensor, block: int) -> list[slice]:
    return [slice(first, min(first + block, x.shape[1])) for first in range(0, x.shape[1], block)]


def _document_before(document: Tensor, span: slice) -> Tensor:
    """[R]: that of the last token before the span."""
    return document[:, span.start - 1] if span.start else torch.zeros_like(document[:, 0])


def _scan_block(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, state: Tensor, document: Tensor, before: Tensor,
    chunk: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As `scan`, of K whole chunks of Q tokens all at once; before [R] is the document that `state` belongs to."""
    dtype, groups = x.dtype, b.shape[2]
    x, b, c = (t.to(dt.dtype) for t in (x, b, c))
    taken = (x * dt[..., None]).unflatten(1, (-1, chunk)).movedim(2, -2)  # [R, K, H, Q, P]
    b, c = (t.unflatten(1, (-1, chunk)).movedim(2, -2) for t in (b, c))  # [R, K, G, Q, S]
    document = document.unflatten(1, (-1, chunk))[:, :, None]  # [R, K, 1, Q]
    rates = (dt * a).unflatten(1, (-1, chunk)).movedim(2, -1)  # [R, K, H, Q]
    faded = _running_sum(rates)  # since the chunk began

    # within chunks: token q sees token s of its own document, faded by what lies between
    seen = (document[..., :, None] == document[..., None, :]).tril()
    fading = _Between.apply(rates, faded.detach(), seen)  # [R, K, H, Q, Q]
    scores = _grouped(fading, groups) * (c @ b.mT)[:, :, :, None]  # [R, K, G, H / G, Q, Q]
    y = scores @ _grouped(taken, groups)

    # between chunks: what each leaves behind of its last document, and what of it the later ones find
    last, whole = document[..., -1], faded[..., -1]  # [R, K, 1], [R, K, H]
    lasting = (whole[..., None] - faded).masked_fill(document != last[..., None], -torch.inf).exp()
    left = (_grouped(taken * lasting[..., None], groups).mT @ b[:, :, :, None]).flatten(2, 3)  # [R, K, H, P, S]
    states = _carried(torch.cat([state[:, None], left], dim=1), whole, last, before)  # [R, K + 1, H, P, S]
    ends = torch.cat([before[:, None, None], last[:, :-1]], dim=1)  # [R, K, 1]: documents that states belong to
    reading = faded.masked_fill(document != ends[..., None], -torch.inf).exp()  # [R, K, H, Q]
    found = c[:, :, :, None] @ _grouped(states[:, :-1], groups).mT  # [R, K, G, H / G, Q, P]
    y = (y + _grouped(reading[..., None], groups) * found).flatten(2, 3)  # [R, K, H, Q, P]
    return (y.movedim(2, -2).flatten(1, 2) + d[:, None] * x).to(dtype), states[:, -1]


class _Between(torch.autograd.Function):
    """What is left at token q of what token s took in: exp of the rates [..., Q] from s + 1 to q, 0 where not `seen`.
    `faded` [..., Q] is their running sum, through which no gradient goes.

    By autograd a rate's gradient would be the difference of two sums of nearly the same numbers, over pairs that end
    behind it and over pairs that begin there; here it is the sum over the pairs that it lies between, which is ten
    times nearer to float64's.
    """

    @staticmethod
    def forward(ctx: Any, rates: Tensor, faded: Tensor, seen: Tensor) -> Tensor:
        left = (faded[..., :, None] - faded[..., None, :]).masked_fill_(~seen, -torch.inf).exp_()
        ctx.save_for_backward(left)
        return left

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (left,) = ctx.saved_tensors
        behind = torch.ones(left.shape[-2:], dtype=left.dtype, device=left.device).triu() @ (grads[0] * left)  # q >= t
        return behind.tril_(-1).sum(-1), None, None  # s < t


def _grouped(t: Tensor, groups: int) -> Tensor:
    """[R, K, H, ...] -> [R, K, G, H / G, ...]"""
    return t.unflatten(2, (groups, -1))


def _running_sum(t: Tensor) -> Tensor:
    """Along the last dimension. torch.cumsum of floats has no deterministic form on GPUs."""
    size = t.shape[-1]
    return t @ torch.ones(size, size, dtype=t.dtype, device=t.device).triu()


def _carried(left: Tensor, whole: Tensor, last: Tensor, before: Tensor) -> Tensor:
    """The state before the first chunk and after each: [R, K + 1, H, P, S].

    left: what came in, and what each chunk leaves behind; whole [R, K, H]: how far a state fades over a chunk.
    """
    passed = _running_sum(F.pad(whole.double(), (0, 0, 1, 0)).movedim(1, -1))  # [R, H, K + 1]
    ends = torch.cat([before[:, None, None], last], dim=1).movedim(1, -1)  # [R, 1, K + 1]
    kept = (ends[..., :, None] == ends[..., None, :]).tril()
    fading = (passed[..., :, None] - passed[..., None, :]).masked_fill(~kept, -torch.inf).exp().to(left.dtype)
    carried = fading @ left.movedim(1, 2).flatten(3)  # [R, H, K + 1, P * S]
    return carried.unflatten(3, left.shape[-2:]).movedim(2, 1)
