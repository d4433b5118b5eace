"""Replicas that each hold the whole model, without FSDP: gradients are added up over them while backward still makes
others (DDP, arXiv:2006.15704), and what only one of them need do is dealt.

FSDP's hooks take the host 3 ms a layer and micro-batch, whatever there is to exchange. Here nothing is gathered, and
what is reduced is reduced once a step: behind each bucket's last gradient in the last micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from prl.models.sharding import is_sharded
from prl.trainer.mixed_precision import is_factor

BUCKET_BYTES = 128 << 20  # of gradients that travel at once; a larger one does so by itself
ALIGNED = 128  # elements: where a gradient begins in its bucket


@dataclass
class Bucket:
    params: list[nn.Parameter]
    offsets: list[int]
    size: int  # elements
    missing: int = 0  # gradients that the last micro-batch has yet to make
    flat: Tensor | None = None  # on its way
    travel: dist.Work | None = None
    made: list[bool] = field(default_factory=list)  # which parameters had a gradient here

    def views(self, flat: Tensor) -> list[Tensor]:
        return [
            flat[offset : offset + param.numel()].view(param.shape)
            for param, offset in zip(self.params, self.offsets, strict=True)
        ]


class ReplicaGradients:
    """Sums of the gradients of `model` over all ranks of the world, which hold it alike.

    dtype: in which they travel. A parameter without a gradient on any rank has none afterwards.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.buckets = list(in_buckets([param for param in in_order(model) if param.requires_grad]))
        self.of = {param: bucket for bucket in self.buckets for param in bucket.params}
        self.sent = len(self.buckets)  # in their order, the same on all ranks; all: no micro-batch is the last yet
        for param in self.of:
            param.register_post_accumulate_grad_hook(self.note)

    def expect_last(self) -> None:
        """The micro-batch that follows is the last of its step."""
        self.sent = 0
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    def note(self, param: Tensor) -> None:
        """Of a gradient that was made or added to."""
        bucket = self.of[param]  # type: ignore[index]
        assert bucket.flat is None, "a gradient was added to when its sum was on its way"
        if self.sent == len(self.buckets):
            return
        bucket.missing -= 1
        while self.sent < len(self.buckets) and self.buckets[self.sent].missing == 0:
            self.send()

    @torch.no_grad()
    def send(self) -> None:
        """The next bucket. What has no gradient here counts as zero."""
        bucket = self.buckets[self.sent]
        self.sent += 1
        grads = [param.grad for param in bucket.params]
        bucket.made = [grad is not None for grad in grads]
        device = bucket.params[0].device
        make = torch.empty if all(bucket.made) else torch.zeros
        flat = bucket.flat = make(bucket.size, dtype=self.dtype, device=device)
        here = [(view, grad) for view, grad in zip(bucket.views(flat), grads, strict=True) if grad is not None]
        if here:
            torch._foreach_copy_([view for view, _ in here], [grad for _, grad in here])
        for param in bucket.params:
            param.grad = None
        bucket.travel = dist.all_reduce(flat, async_op=True)

    @torch.no_grad()
    def finish(self) -> None:
        """Before the optimizer steps: every gradient is the sum over all ranks. A collective of the world, whatever
        this rank's gradients are.
        """
        if self.sent == len(self.buckets) and all(bucket.flat is None for bucket in self.buckets):
            self.sent = 0  # no micro-batch was said to be the last
        while self.sent < len(self.buckets):
            self.send()
        made = torch.tensor([made for bucket in self.buckets for made in bucket.made], dtype=torch.uint8)
        dist.all_reduce(made, op=dist.ReduceOp.MAX)
        anywhere = iter(made.tolist())
        for bucket in self.buckets:
            assert bucket.flat is not None
            assert bucket.travel is not None
            bucket.travel.wait()
            flat = bucket.flat.to(bucket.params[0].dtype)
            for param, view in zip(bucket.params, bucket.views(flat), strict=True):
                if next(anywhere):
                    param.grad = view
            bucket.flat = bucket.travel = None


def in_order(model: nn.Module) -> list[nn.Parameter]:
    """Parameters as backward comes to them: the last first, and behind all others those that are cast before the model
    runs. The same in each run, so that sums are added up alike in one that goes on.
    """
    readers = [(module, param) for module in model.modules() for param in module._parameters.values()]
    early = {param for module, param in readers if param is not None and not is_factor(module, param)}
    backwards = list(model.parameters())[::-1]
    return [param for param in backwards if param not in early] + [param for param in backwards if param in early]


def in_buckets(params: Iterable[nn.Parameter]) -> Iterable[Bucket]:
    """In their order; those of one dtype in a bucket."""
    held: list[nn.Parameter] = []
    for param in params:
        if held and (param.dtype != held[0].dtype or sum(p.nbytes for p in held) + param.nbytes > BUCKET_BYTES):
            yield _bucket(held)
            held = []
        held.append(param)
    if held:
        yield _bucket(held)


def _bucket(params: list[nn.Parameter]) -> Bucket:
    *offsets, size = accumulate((-(-param.numel() // ALIGNED) * ALIGNED for param in params), initial=0)
    return Bucket(params, offsets, size)


def are_replicas(model: nn.Module) -> bool:
    """Whether several ranks hold all of `model` each."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return several and not any(is_sharded(param) for param in model.parameters())


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """Whose each is, of things that all ranks have: each rank gets about as much, the same wherever it is asked."""
    loads = [(0, rank) for rank in range(ranks)]
    owners = [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + sizes[index], owners[index]))
    return owners
