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

import torch
import torch.distributed as dist
from torch import Tensor

from prl.models.experts.dispatch import ExpertCompute, collect, invert, spread
from prl.models.experts.trips import HostCopy, Trips


class AllToAllDispatch:
    """Experts are spread over `group`; one host synchronisation per call, for the split sizes.

    pieces: in how many the tokens go, the same on every rank. Between GPUs joined by NVLink one was fastest: what more
    pieces hide is less than what smaller GEMMs lose.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int = 1) -> None:
        self.group, self.pieces = group, pieces

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, compute: ExpertCompute) -> Tensor:
        """As `LocalDispatch`; `compute` sees the tokens of all ranks that chose this rank's experts."""
        size = self.group.size()
        shares = [part.tensor_split(self.pieces) for part in (x, weights, experts.int())]
        routes = [Route.choose(chosen, size, num_experts) for chosen in shares[2]]
        pairs = [count_pairs(chosen, num_experts).view(size, -1) for chosen in shares[2]]
        counts = [torch.cat([route.count_rows()[:, None], held], 1) for route, held in zip(routes, pairs, strict=True)]
        arriving, sizes = exchange_counts(counts, self.group)
        # the device copies rows while the host waits for the sizes
        leaving = [[route.fan_out(part) for part in parts] for route, *parts in zip(routes, *shares, strict=True)]
        with Trips() as trips:
            splits = sizes.wait()
            there = [
                [trips.begin(part, sent, received, self.group) for part in parts]
                for parts, (sent, received, _) in zip(leaving, splits, strict=True)
            ]
            back = []
            for parts, held, (sent, received, there_are) in zip(there, arriving, splits, strict=True):
                rows, scale, chosen = (trip.end() for trip in parts)
                chosen = chosen - self.group.rank() * len(held)
                y = run_experts(rows, scale, chosen, held, sum(there_are), compute)
                back.append(trips.begin(y, received, sent, self.group))
            return torch.cat([route.add_up(trip.end()) for route, trip in zip(routes, back, strict=True)])


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
    """Which tokens go to which of several places, each once: rows in order of place, then token. A place is a rank, or
    for `HierarchicalDispatch` a node.

    positions [N, P]: the row of token n for place p, or -1; order [U]: the flat index into positions of each row, 0
    beyond the last, for U is what there can be at most.
    """

    order: Tensor
    positions: Tensor

    @classmethod
    def choose(cls, experts: Tensor, places: int, num_experts: int, rows: int | None = None) -> Route:
        """For experts [N, K] int32 of num_experts, spread over `places`; those out of range are at none of them.

        rows: how many there are, where the host knows it. It does not wait.
        """
        tokens, top_k = experts.shape
        hit = reached(experts, places, num_experts).T.flatten()
        positions = (hit.cumsum(0) - 1).masked_fill_(~hit, -1).view(places, tokens).T.contiguous()
        return cls(invert(positions, tokens * min(places, top_k) if rows is None else rows), positions)

    def count_rows(self) -> Tensor:
        """[P], for each place."""
        return (self.positions >= 0).sum(0)

    def fan_out(self, x: Tensor) -> Tensor:
        """x [N, ...] -> rows [U, ...], in the order of travel."""
        return spread(x, self.order, self.positions)

    def add_up(self, rows: Tensor) -> Tensor:
        """The rows that came back -> [N, H]: each token's sum."""
        return collect(rows, self.order[: len(rows)], self.positions, keep=True)


def reached(experts: Tensor, places: int, num_experts: int) -> Tensor:
    """[N, P] bool: the places that hold any of each token's experts [N, K]; those out of range are nowhere."""
    away = (experts < 0) | (experts >= num_experts)
    place = (experts // (num_experts // places)).masked_fill_(away, places).long()
    hit = torch.zeros(len(experts), places + 1, dtype=torch.bool, device=experts.device)
    return hit.scatter_(1, place, True)[:, :places]


def count_pairs(experts: Tensor, num_experts: int) -> Tensor:
    """[E]: how many tokens chose each expert; experts [N, K]."""
    experts = experts.flatten().long()
    pairs = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    return pairs.scatter_add_(0, experts, torch.ones_like(experts))


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
