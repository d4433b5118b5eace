"""Expert parallelism through DeepEP (github.com/deepseek-ai/DeepEP): its kernels send each token once to every rank
that holds any of its experts, over NVLink in a node and RDMA between nodes.

Written against `deep_ep.Buffer` as of DeepEP 1.2 (in 2.x the legacy API). What runs in this project's tests is the
autograd and the bookkeeping, over a stand-in for the library. The real kernels of 1.2.1 were run over the NVLink of one
node, between two ranks, against `AllToAllDispatch`; over several nodes never.

Mixing weights: DeepEP's combine adds without weights. They travel by dispatch's `topk_weights` to the experts, which
apply them in their activation (as for the other dispatches), and their gradients come back by combine's `topk_weights`,
in the call that brings the tokens' gradients.

With a `token_chunk_size` the tokens go in pieces, so that one piece's experts compute while its neighbours travel:

    compute stream          G0    G1    G2
    communication stream  D0   D1 C0 D2 C1 C2      D: dispatch, C: combine, G: experts

and in backward the same from the right. For that each piece's combine is asked for only after the experts of the next
piece: the autograd engine runs nodes in the reverse order of their creation, so backward then asks for a piece's
gradients before it computes with those of the piece after it. Events, not streams' order, say what waits for what.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from prl.config.errors import UserError
from prl.config.packages import DEEP_EP, NOT_LOADED
from prl.models.experts.dispatch import ExpertWork, collect, nothing, spread, spread_scalars
from prl.models.experts.placement import place

if TYPE_CHECKING:
    import deep_ep


NVLINK_RANKS = 8  # as many ranks DeepEP takes to be in one node


class DeepEPDispatch:
    """`AllToAllDispatch` by DeepEP; bfloat16 only. One object serves all layers, for its buffer is shared.

    group: the expert group; num_sms: multiprocessors that its kernels may take (even); token_chunk_size: most tokens of
    this rank in one piece, None: all in one.
    """

    def __init__(self, group: dist.ProcessGroup, num_sms: int, token_chunk_size: int | None) -> None:
        self.group, self.size, self.token_chunk_size = group, group.size(), token_chunk_size
        self.num_sms = num_sms
        self.buffer: deep_ep.Buffer | None = None

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, work: ExpertWork) -> Tensor:
        """x [N, H], weights [N, K], experts [N, K] -> [N, H]; the host waits once a piece, for the counts."""
        if self.buffer is None:
            self.buffer = make_buffer(self.group, x, self.num_sms)
        pieces = self.count_pieces(len(x))
        inputs = pad_tokens(x, weights.float(), experts, pieces)
        return exchange(self.buffer, *inputs, num_experts, work, pieces)[: len(x)]

    def count_pieces(self, num_tokens: int) -> int:
        """The same on every rank of the group, however many tokens each has: dispatch is a collective."""
        if self.token_chunk_size is None:
            return 1
        pieces = torch.tensor(
            math.ceil(num_tokens / self.token_chunk_size)
        )  # on the host: the device is not waited for
        dist.all_reduce(pieces, op=dist.ReduceOp.MAX, group=self.group)
        return int(pieces)


def make_buffer(group: dist.ProcessGroup, x: Tensor, num_sms: int) -> deep_ep.Buffer:
    """The group's communication buffer for rows like those of x [N, H]; a collective over the group."""
    try:
        from deep_ep import Buffer
    except NOT_LOADED as error:
        raise UserError(
            f"DeepEP cannot be imported ({error}).",
            where=f"parallelism.ep_comm_backend=deepep, {DEEP_EP.installed}",
            why="it is built for one PyTorch and one CUDA",
            fix=f"{DEEP_EP.install}; or parallelism.ep_comm_backend=torch",
        ) from error

    Buffer.set_num_sms(num_sms)
    row_bytes = x.shape[1] * max(x.element_size(), 2)
    configs = (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size()))
    nvl_bytes = max(config.get_nvl_buffer_size_hint(row_bytes, group.size()) for config in configs)
    rdma_bytes = 0
    if group.size() > NVLINK_RANKS:  # else a DeepEP built without NVSHMEM serves, which has no answer to this
        rdma_bytes = max(config.get_rdma_buffer_size_hint(row_bytes, group.size()) for config in configs)
    return Buffer(group, nvl_bytes, rdma_bytes)


def pad_tokens(x: Tensor, weights: Tensor, experts: Tensor, pieces: int) -> tuple[Tensor, Tensor, Tensor]:
    """At least one token for each piece; those added choose no expert (-1)."""
    missing = max(pieces - len(x), 0)
    if missing == 0:
        return x, weights, experts
    return (
        F.pad(x, (0, 0, 0, missing)),
        F.pad(weights, (0, 0, 0, missing)),
        F.pad(experts, (0, 0, 0, missing), value=-1),
    )


@dataclass
class Piece:
    """One piece's way to its experts and back: the handle of its layout, and the events that end its travels."""

    buffer: deep_ep.Buffer
    num_experts: int
    ready: Any  # event: when the tokens were there
    handle: Any = None
    counts: list[int] = field(default_factory=list)  # rows received by each expert held here
    dispatched: Any = None
    computed: Any = None
    combined: Any = None
    grad_dispatched: Any = None
    grad_combined: Any = None
    meanwhile: Callable[[], object] = nothing  # what the device can do while gradients travel to the experts


def exchange(
    buffer: deep_ep.Buffer,
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    num_experts: int,
    work: ExpertWork,
    pieces: int,
) -> Tensor:
    """x [N, H], weights [N, K] float32, experts [N, K] -> [N, H], in this many pieces; for their order see above."""
    ready = buffer.capture()
    flights = [Piece(buffer, num_experts, ready) for _ in range(pieces)]
    flights[-1].meanwhile = work.behind  # the first in backward
    parts = Part.apply(x, weights, flights)
    choices = experts.tensor_split(pieces)
    outputs: list[Tensor] = []
    results: list[Tensor] = []
    for index, piece in enumerate(flights):
        sent = parts[2 * index], parts[2 * index + 1], choices[index]
        outputs.append(run_experts(*sent, piece, work, first=index == 0))
        if index > 0:
            results.append(Combine.apply(outputs[index - 1], flights[index - 1]))
    results.append(Combine.apply(outputs[-1], flights[-1]))
    for piece in flights:
        piece.combined.current_stream_wait()
    return torch.cat(results)


def run_experts(x: Tensor, weights: Tensor, experts: Tensor, piece: Piece, work: ExpertWork, first: bool) -> Tensor:
    """Dispatch a piece's tokens and launch the experts held here: -> [R, H], for each token received the sum of what
    these experts make of it. While the first piece is under way, the device has other work.
    """
    rows, scale, chosen = Dispatch.apply(x, weights, experts, piece)
    if first:
        work.ahead()
    piece.dispatched.current_stream_wait()
    places, counts = place(chosen, 0, len(piece.counts), sum(piece.counts), work.alignment)
    scale = spread_scalars(scale.to(x.dtype), places)
    y = collect(work.compute(spread(rows, places), counts, scale), places)
    y = GradWait.apply(y, piece)
    piece.computed = piece.buffer.capture()
    return y


class Part(torch.autograd.Function):
    """x [N, H], weights [N, K] -> the pieces' shares of both, alternating. Backward waits for all their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, flights: list[Piece]) -> tuple[Tensor, ...]:
        ctx.flights = flights
        shares = zip(x.tensor_split(len(flights)), weights.tensor_split(len(flights)), strict=True)
        return tuple(part for share in shares for part in share)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        for piece in ctx.flights:
            piece.grad_combined.current_stream_wait()
        return torch.cat(grads[::2]), torch.cat(grads[1::2]), None


class Dispatch(torch.autograd.Function):
    """x [N, H], weights [N, K] float32, experts [N, K] -> rows received [R, H], their weights [R, K], their experts as
    counted on this rank [R, K] or -1. Not to be read before piece.dispatched; backward is a combine.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, experts: Tensor, piece: Piece) -> tuple[Tensor, Tensor, Tensor]:
        ctx.piece = piece
        asynchronous = {"async_finish": True, "allocate_on_comm_stream": True}
        per_rank, per_node, per_expert, in_rank, counted = piece.buffer.get_dispatch_layout(
            experts, piece.num_experts, previous_event=piece.ready, **asynchronous
        )
        rows, chosen, scale, piece.counts, piece.handle, piece.dispatched = piece.buffer.dispatch(
            x.contiguous(),
            topk_idx=experts,
            topk_weights=weights.contiguous(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            previous_event=counted,
            **asynchronous,
        )
        ctx.mark_non_differentiable(chosen)
        return rows, scale, chosen

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        piece = ctx.piece
        grad_x, grad_weights, piece.grad_combined = piece.buffer.combine(
            grads[0].contiguous(),
            piece.handle,
            topk_weights=grads[1].contiguous(),
            previous_event=piece.buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return grad_x, grad_weights, None, None


class GradWait(torch.autograd.Function):
    """y as it is; backward waits until its gradient, which `Combine` asked for, has arrived."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, piece: Piece) -> Tensor:
        ctx.piece = piece
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.piece.grad_dispatched.current_stream_wait()
        return grads[0], None


class Combine(torch.autograd.Function):
    """y [R, H] -> [N, H], the sum of what all ranks made of each token. Not to be read before piece.combined; backward
    is a dispatch by the same layout.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, piece: Piece) -> Tensor:
        ctx.piece = piece
        result, _, piece.combined = piece.buffer.combine(
            y, piece.handle, previous_event=piece.computed, async_finish=True, allocate_on_comm_stream=True
        )
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        piece = ctx.piece
        grad, _, _, _, _, piece.grad_dispatched = piece.buffer.dispatch(
            grads[0].contiguous(),
            handle=piece.handle,
            previous_event=piece.buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        piece.meanwhile()
        return grad, None
