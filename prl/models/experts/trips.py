"""Rows on their way between ranks: an all-to-all that begins at one place of the program and ends at another, in
forward and in backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Trips:
    """The trips of one dispatch. When it ends they are over: recomputation may end it early, by an exception, and then
    nothing may be left under way.
    """

    def __init__(self) -> None:
        self.begun: list[Trip] = []

    def begin(self, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Trip:
        self.begun.append(Trip(rows, sent, received, group))
        return self.begun[-1]

    def __enter__(self) -> Trips:
        return self

    def __exit__(self, *raised: object) -> None:
        for trip in self.begun:
            trip.settle()
            trip.rows = None


class Trip:
    """Rows [M, ...] on their way, sent[i] of them to rank i and received[i] from it; what lies beyond stays here."""

    def __init__(self, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self.num_rows, self.sent, self.received, self.group = len(rows), sent, received, group
        self.work: dist.Work | None = None
        self.grad: Tensor | None = None
        self.meanwhile: Callable[[], object] | None = None  # what the device can do while gradients travel
        self.rows: Tensor | None = Depart.apply(rows, self)

    def end(self) -> Tensor:
        """The rows that arrived [sum(received), ...]. The device waits for them, the host does not."""
        rows, self.rows = Arrive.apply(self.rows, self), None
        return rows

    def launch(self, target: Tensor, rows: Tensor, received: list[int], sent: list[int]) -> None:
        self.work = dist.all_to_all_single(target, rows, received, sent, group=self.group, async_op=True)

    def settle(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work = None


class Depart(torch.autograd.Function):
    """Backward waits for the gradients that `Arrive` sent back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        arriving = rows.new_empty(sum(trip.received), *rows.shape[1:])
        trip.launch(arriving, rows[: sum(trip.sent)], trip.received, trip.sent)
        return arriving

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        trip = ctx.trip
        trip.settle()
        grad, trip.grad = trip.grad, None
        return grad, None


class Arrive(torch.autograd.Function):
    """Rows as they are, once they are here; backward sends their gradients off."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        trip.settle()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        trip, grad = ctx.trip, grads[0].contiguous()
        trip.grad = grad.new_empty(trip.num_rows, *grad.shape[1:])  # nobody reads what lies beyond the rows sent
        trip.launch(trip.grad[: sum(trip.sent)], grad, trip.sent, trip.received)
        if trip.meanwhile is not None:
            trip.meanwhile()
        return grad, None  # to keep it until `Depart`, which knows better
