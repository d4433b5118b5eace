"""The LM head as the losses need it: log-probability and entropy of chosen positions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import repeat
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prl.config.schema import GREEDY_BELOW
from prl.trainer.head.truncation import KeptSets

AUTO_CHUNK_TOKENS = 8192
WAITING_CHUNKS = {"auto": 2}  # whose logits wait for backward, which comes next; where a size is given, one

Head = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def logprob_head(
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int | Literal["auto", "disabled"],
    kept: KeptSets | None = None,
    repeated: bool = False,
) -> Head:
    """A head for `Decoder.forward`: (hidden [N, H], weight [V, H]) -> log p(target) [M], entropy [M], float32.

    rows [M] are the positions whose next-token distribution is wanted, each at most once unless `repeated`; targets
    [M] the tokens that followed. The distribution is that of logits / temperature, as the engine samples it, and where
    it truncates, that over the entries which it kept; so is the entropy. With a chunk size (tokens), the logits of one
    chunk exist at a time ("auto": of two), forward and backward, so memory does not grow with M times V.
    """
    # greedy engines report the distribution at temperature 1
    scale = 1.0 if temperature < GREEDY_BELOW else 1.0 / temperature

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        if chunk == "disabled":
            return _whole_head(hidden[rows], weight, targets, scale, kept)
        size = AUTO_CHUNK_TOKENS if chunk == "auto" else chunk
        waiting = WAITING_CHUNKS.get(str(chunk), 1) if torch.is_grad_enabled() else 0
        return ChunkedHead.apply(hidden, weight, rows, targets, scale, size, kept, repeated, waiting)

    return head


def _whole_head(
    hidden: Tensor, weight: Tensor, targets: Tensor, scale: float, kept: KeptSets | None
) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight)  # [M, V]
    if kept is not None:
        logits = kept.restrict(logits)
    logprobs = (logits.float() * scale).log_softmax(dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return -F.nll_loss(logprobs, targets, reduction="none"), entropy


class ChunkedHead(torch.autograd.Function):
    """Logits are computed chunk by chunk in forward, and again in backward, where their gradient overwrites them; those
    of the last chunks wait for it, in memory that backward needs for others anyway.

    Four matrix products instead of three but for the last chunks, for never keeping [M, V]. The weight's gradient is
    summed over chunks in the weight's own dtype, one rounding a chunk: in bfloat16 its relative error is 0.2 % with one
    chunk (as without any), 0.4 % with 8 and 0.9 % with 64, where a float32 sum would cost 4 V H bytes. Within a chunk
    sums are float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor,
        targets: Tensor,
        scale: float,
        size: int,
        kept: KeptSets | None,
        repeated: bool,
        waiting: int,
    ) -> tuple[Tensor, Tensor]:
        pieces = list(zip(rows.split(size), targets.split(size), _pieces(kept, size, len(rows)), strict=True))
        statistics = []
        ctx.waiting = {}  # logits by chunk
        for chunk, (r, t, k) in enumerate(pieces):
            logits = _chunk_logits(hidden[r], weight, k)
            statistics.append(_statistics(logits, t, scale))
            if chunk >= len(pieces) - waiting:
                ctx.waiting[chunk] = logits
            del logits
        logp, lse, mean = (torch.cat(parts) for parts in zip(*statistics, strict=True))
        ctx.save_for_backward(hidden, weight, rows, targets, lse, mean)
        ctx.scale, ctx.size, ctx.kept, ctx.repeated = scale, size, kept, repeated
        return logp, lse - mean

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, rows, targets, lse, mean = ctx.saved_tensors
        d_hidden = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None  # frozen under LoRA
        parts = (t.split(ctx.size) for t in (rows, targets, lse, mean, *(grad.contiguous() for grad in grads)))
        pieces = list(zip(_pieces(ctx.kept, ctx.size, len(rows)), *parts, strict=True))
        for chunk, (k, r, *numbers) in reversed(list(enumerate(pieces))):  # those that wait first, to make room
            picked = hidden[r]
            logits = ctx.waiting.pop(chunk, None)
            d_logits = _gradient(_chunk_logits(picked, weight, k) if logits is None else logits, ctx.scale, *numbers)
            del logits
            if d_hidden is not None and ctx.repeated:
                d_hidden.index_add_(0, r, d_logits @ weight)
            elif d_hidden is not None:
                d_hidden[r] = d_logits @ weight
            if d_weight is not None:
                d_weight.addmm_(d_logits.t(), picked)
            del d_logits
        return d_hidden, d_weight, None, None, None, None, None, None, None


def _pieces(kept: KeptSets | None, size: int, rows: int) -> Iterable[KeptSets | None]:
    """Of each chunk, as `Tensor.split` makes them: of no rows there is one."""
    return repeat(None, max(1, -(-rows // size))) if kept is None or not rows else kept.split(size)


def _chunk_logits(picked: Tensor, weight: Tensor, kept: KeptSets | None) -> Tensor:
    """[m, V], of which the entries that could not be drawn are impossible: their gradient is 0."""
    logits = F.linear(picked, weight)
    return logits if kept is None else kept.restrict_(logits)


def _statistics(logits: Tensor, targets: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """logits [M, V], targets [M] -> log p(target), log-sum-exp and mean of z = scale * logits under p: [M] float32."""
    if logits.is_cuda:
        from prl.trainer.head.kernels import row_statistics

        return row_statistics(logits, targets, scale)
    z = logits.float() * scale
    lse = z.logsumexp(dim=-1)
    mean = ((z - lse[:, None]).exp() * z).sum(dim=-1)
    return z.gather(1, targets[:, None]).squeeze(1) - lse, lse, mean


def _gradient(
    logits: Tensor, scale: float, targets: Tensor, lse: Tensor, mean: Tensor, g_logp: Tensor, g_entropy: Tensor
) -> Tensor:
    """The gradient of logits [M, V], given those of log p(target) [M] and of the entropy [M]; may reuse the memory."""
    if logits.is_cuda:
        from prl.trainer.head.kernels import write_gradient

        return write_gradient(logits, targets, lse, mean, g_logp, g_entropy, scale)
    z = logits.float() * scale
    p = (z - lse[:, None]).exp()
    grad = -p * (g_logp[:, None] + g_entropy[:, None] * (z - mean[:, None]))
    grad.scatter_add_(1, targets[:, None], g_logp[:, None])
    return (grad * scale).to(logits.dtype)
