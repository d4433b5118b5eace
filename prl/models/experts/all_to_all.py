"""Expert parallelism by all-to-all: tokens travel to the ranks that hold their experts, and back.

Each rank of an expert group of `ep` ranks holds E / ep neighbouring experts (GShard, arXiv:2006.16668). A token goes
once to every rank that holds any of its experts, and what these make of it is added up before it goes back (as in
DeepEP): with 8 of 128 experts on 4 ranks that is 3.6 rows on average instead of 8.

Tokens may go in pieces, so that one piece travels while the experts compute on another:

    compute stream               G0    G1
    communication stream   D0 D1    C0    C1      D: dispatch, C: combine, G: experts

and in backward the same from the right: the autograd engine runs nodes in the reverse order of their creation, so that
it sends a piece's gradients off (`Arrive`) before it computes with those of another, and waits for them (`Depart`)
only then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.models.experts.dispatch import ExpertCompute, collect, invert, spread


class AllToAllDispatch:
    """Experts are spread over `group`; one host synchronisation per call, for the split sizes.

    pieces: in how many the tokens go, the same on every rank. Between GPUs joined by NVLink one was fastest: what more
    pieces hide is less than what smaller GEMMs lose.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int = 1) -> None:
        self.group, self.pieces = group, pieces

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: ExpertCompute) -> Tensor:
        """As `LocalDispatch`; `compute` sees the tokens of all ranks that chose this rank's experts."""
        shares = [part.tensor_split(self.pieces) for part in (x, weights, experts.int())]
        routes = [Route.choose(chosen, self.group.size(), num_experts) for chosen in shares[2]]
        arriving, sizes = exchange_counts([route.counts for route in routes], self.group)
        # the device copies rows while the host waits for the sizes
        leaving = [[route.fan_out(part) for part in parts] for route, *parts in zip(routes, *shares, strict=True)]
        trips: list[Trip] = []

        def travel(rows: Tensor, sent: list[int], received: list[int]) -> Trip:
            trips.append(Trip(rows, sent, received, self.group))
            return trips[-1]

        try:
            splits = sizes.wait()
            there = [
                [travel(part, sent, received) for part in parts]
                for parts, (sent, received, _) in zip(leaving, splits, strict=True)
            ]
            back = []
            for parts, counts, (sent, received, pairs) in zip(there, arriving, splits, strict=True):
                rows, scale, chosen = (trip.end() for trip in parts)
                chosen = chosen - self.group.rank() * len(counts)
                y = run_experts(rows, scale, chosen, counts, sum(pairs), compute)
                back.append(travel(y, received, sent))
            return torch.cat([route.add_up(trip.end()) for route, trip in zip(routes, back, strict=True)])
        finally:  # recomputation may end this function early, by an exception: nothing may be left under way
            for trip in trips:
                trip.settle()
                trip.rows = None


def exchange_counts(counts: list[Tensor], group: dist.ProcessGroup) -> tuple[Tensor, HostCopy]:
    """Each piece's counts [ep, 1 + E_local] of what leaves for each rank: rows, then pairs with each of its experts.

    Returns the pairs that arrive [pieces, E_local], and on their way to the host [pieces, 3, ep]: rows sent, rows
    received, pairs received.
    """
    sent = torch.stack(counts, dim=1)  # [ep, pieces, 1 + E_local]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    pairs = received[..., 1:]
    sizes = torch.stack([sent[..., 0], received[..., 0], pairs.sum(-1)])  # [3, ep, pieces]
    return pairs.sum(0), HostCopy(sizes.permute(2, 0, 1).contiguous())


@dataclass
class Route:
    """Which tokens go to which rank, each once: rows in order of rank, then token.

    positions [N, ep]: the row of token n for rank r, or -1; order [U]: the flat index into positions of each row, 0
    beyond the last, for U is what there can be at most. counts [ep, 1 + E_local]: rows, and pairs of token and expert.
    """

    order: Tensor
    positions: Tensor
    counts: Tensor

    @classmethod
    def choose(cls, experts: Tensor, size: int, num_experts: int) -> Route:
        """For experts [N, K] int32, spread over `size` ranks. The host does not wait."""
        (tokens, top_k), device = experts.shape, experts.device
        experts = experts.long()
        hit = torch.zeros(tokens, size, dtype=torch.bool, device=device)
        hit = hit.scatter_(1, experts // (num_experts // size), True).T.flatten()
        positions = (hit.cumsum(0) - 1).masked_fill_(~hit, -1).view(size, tokens).T.contiguous()
        pairs = torch.zeros(num_experts, dtype=torch.int64, device=device)
        pairs.scatter_add_(0, experts.flatten(), torch.ones_like(experts).flatten())
        counts = torch.cat([hit.view(size, tokens).sum(1, keepdim=True), pairs.view(size, -1)], dim=1)
        return cls(invert(positions, tokens * min(size, top_k)), positions, counts)

    def fan_out(self, x: Tensor) -> Tensor:
        """x [N, ...] -> rows [U, ...], in the order of travel."""
        return spread(x, self.order, self.positions)

    def add_up(self, rows: Tensor) -> Tensor:
        """The rows that came back -> [N, H]: each token's sum."""
        return collect(rows, self.order[: len(rows)], self.positions, keep=True)


def run_experts(x: Tensor, scale: Tensor, chosen: Tensor, counts: Tensor, pairs: int, compute: ExpertCompute) -> Tensor:
    """Rows x [R, H] that arrived, weights scale [R, K], experts as counted on this rank chosen [R, K] (those elsewhere
    are out of range), counts [E_local] with the sum `pairs` -> [R, H]: for each row what the experts here make of it.
    """
    held = len(counts)
    away = (chosen < 0) | (chosen >= held)
    keys = chosen.masked_fill(away, held).flatten().to(torch.int16)  # a radix sort of half the bits
    order = keys.sort(stable=True).indices
    positions = invert(order, len(order)).view(chosen.shape).masked_fill_(away, -1)
    order = order[:pairs]
    y = compute(spread(x, order, positions), counts, spread(scale.flatten(), order, positions.view(-1, 1)))
    return collect(y, order, positions)


# --- on the way -------------------------------------------------------------------------------------------------------


class Trip:
    """Rows [M, ...] on their way, sent[i] of them to rank i and received[i] from it; what lies beyond stays here."""

    def __init__(self, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> None:
        self.num_rows, self.sent, self.received, self.group = len(rows), sent, received, group
        self.work: dist.Work | None = None
        self.grad: Tensor | None = None
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
        return grad, None  # to keep it until `Depart`, which knows better


class HostCopy:
    """A small device tensor on its way to the host, so that the device can be given work before the host waits."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to("cpu", non_blocking=True)  # into pinned memory
        self.arrived = torch.cuda.Event() if values.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> list[Any]:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values.tolist()
