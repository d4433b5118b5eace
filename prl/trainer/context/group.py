"""The ranks that share a sequence, and what they say to each other: a sum, an exchange of heads for tokens, a ring."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.config.schema_model import CpStyle


@dataclass(frozen=True)
class ContextGroup:
    """This rank's place among the `size` >= 2 ranks that share a sequence."""

    group: dist.ProcessGroup
    rank: int
    size: int
    style: CpStyle

    def of(self, rank: int) -> ContextGroup:
        """The place of another rank of the group."""
        return replace(self, rank=rank)


def sum_over_context(values: Tensor, context: ContextGroup) -> Tensor:
    """Sum over the ranks; the gradient passes through unchanged.

    For a loss that every rank computes in full from the sum: each rank then gets the gradient of its own addend, and
    the parameters' gradients, added up over the ranks, count the loss once.
    """
    return _Sum.apply(values, context)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, context: ContextGroup) -> Tensor:
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=context.group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def exchange(parts: Tensor, context: ContextGroup) -> Tensor:
    """parts [cp, ...]: part i goes to rank i -> [cp, ...]: part i came from rank i. Differentiable."""
    return _Exchange.apply(parts, context)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, parts: Tensor, context: ContextGroup) -> Tensor:
        ctx.context = context
        return all_to_all(parts, context)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_to_all(grad, ctx.context), None


def all_to_all(parts: Tensor, context: ContextGroup) -> Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=context.group)
    return received


@dataclass
class Passing:
    """A tensor on its way to the next rank, while another comes in from the one before."""

    sent: Tensor  # must stay as it is until the wait is over
    received: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


def pass_on(tensor: Tensor, context: ContextGroup, tag: int) -> Passing:
    """Start sending a contiguous tensor around the ring; every rank does so in the same order.

    Send and receive are one batch: on NCCL they start together, so no order of ranks can deadlock, and run beside
    whatever is computed until the wait. `tag` keeps apart tensors that travel at the same time on gloo.
    """
    received = torch.empty_like(tensor)
    next_rank = dist.get_global_rank(context.group, (context.rank + 1) % context.size)
    last_rank = dist.get_global_rank(context.group, (context.rank - 1) % context.size)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, next_rank, context.group, tag),
            dist.P2POp(dist.irecv, received, last_rank, context.group, tag),
        ]
    )
    return Passing(tensor, received, works)
