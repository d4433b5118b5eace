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

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from prl.models.device import HostCopy
from prl.models.experts.dispatch import ExpertWork, collect, spread, spread_scalars
from prl.models.experts.placement import Places, invert, place
from prl.models.experts.trips import Trip, Trips


class AllToAllDispatch:
    """Experts are spread over `group`; one host synchronisation per call, for the split sizes.

    pieces: in how many the tokens go, the same on every rank. Between GPUs joined by NVLink one was fastest: what more
    pieces hide is less than what smaller GEMMs lose.
    """

    def __init__(self, group: dist.ProcessGroup, pieces: int = 1) -> None:
        self.group, self.pieces = group, pieces

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, work: ExpertWork) -> Tensor:
        """As `LocalDispatch`; `compute` sees the tokens of all ranks that chose this rank's experts."""
        size, held = self.group.size(), num_experts // self.group.size()
        shares = [cut(part, self.pieces) for part in (x, weights, experts)]
        routes = [Route.choose(chosen, size, num_experts) for chosen in shares[2]]
        sizes = exchange_counts([route.counts for route in routes], self.group)
        # the device copies rows while the host waits for the sizes
        labels = [join_labels(*parts) for parts in zip(*shares[1:], strict=True)]
        leaving = [[r.fan_out(label), r.fan_out(x)] for r, label, x in zip(routes, labels, shares[0], strict=True)]
        with Trips() as trips:
            splits = read_sizes(sizes.wait())
            there = [
                [trips.begin(part, sent, received, self.group) for part in parts]
                for parts, (sent, received, _) in zip(leaving, splits, strict=True)
            ]
            work.ahead()
            back = []
            for parts, (sent, received, pairs) in zip(there, splits, strict=True):
                y = run_experts(parts, Here(self.group.rank() * held, held, pairs), work)
                back.append(trips.begin(y, received, sent, self.group))
            back[-1].meanwhile = work.behind  # the first in backward
            return join([route.add_up(trip.end()) for route, trip in zip(routes, back, strict=True)])


def cut(x: Tensor, pieces: int) -> Sequence[Tensor]:
    return x.tensor_split(pieces) if pieces > 1 else [x]


def join(pieces: list[Tensor]) -> Tensor:
    """What `cut` cut."""
    return torch.cat(pieces) if len(pieces) > 1 else pieces[0]


def exchange_counts(counts: list[Tensor], group: dist.ProcessGroup) -> HostCopy:
    """Each piece's counts [ep, 1 + E_local] of what leaves for each rank: rows, then pairs with each of its experts.

    On their way to the host are [2, ep, pieces, 1 + E_local]: what is sent, and what is received.
    """
    both = torch.stack([torch.stack(counts, dim=1)] * 2)
    dist.all_to_all_single(both[1], both[0], group=group)
    return HostCopy(both)


def read_sizes(counts: Tensor) -> list[tuple[list[int], list[int], int]]:
    """Of `exchange_counts` on the host: for each piece the rows sent to each rank, those received, and the pairs of a
    row and an expert here.
    """
    rows, pairs = counts[..., 0].permute(2, 0, 1).tolist(), counts[1, ..., 1:].sum((0, 2)).tolist()
    return [(sent, received, number) for (sent, received), number in zip(rows, pairs, strict=True)]


# --- the sender's side ------------------------------------------------------------------------------------------------


@dataclass
class Route:
    """Which tokens go to which of several places, each once: rows in order of place, then token. A place is a rank, or
    for `HierarchicalDispatch` a node.

    places: of N tokens in P places; its rows are as many as there can be at most, and those beyond the last are not
    sent. counts [P, 1 + E / P] int64: for each place its rows, and then the pairs of a token and each of its experts.
    """

    places: Places
    counts: Tensor

    @classmethod
    def choose(cls, experts: Tensor, places: int, num_experts: int, rows: int | None = None) -> Route:
        """For experts [N, K] of num_experts, spread over `places`; those out of range are at none of them.

        rows: how many there are, where the host knows it. It does not wait.
        """
        tokens, top_k = experts.shape
        num_rows = tokens * min(places, top_k) if rows is None else rows
        if experts.is_cuda:
            from prl.models.experts.placement_kernels import place_tokens

            positions, counts = place_tokens(experts, places, num_experts)
            return cls(Places(positions, num_rows, None), counts)
        hit = reached(experts, places, num_experts).T.flatten()
        positions = (hit.cumsum(0) - 1).masked_fill_(~hit, -1).view(places, tokens).T.contiguous()
        pairs = count_pairs(experts, num_experts).view(places, -1)
        counts = torch.cat([(positions >= 0).sum(0)[:, None], pairs], 1)
        return cls(Places(positions, num_rows, invert(positions, num_rows)), counts)

    def fan_out(self, x: Tensor) -> Tensor:
        """x [N, ...] -> rows [U, ...], in the order of travel."""
        return spread(x, self.places)

    def add_up(self, rows: Tensor) -> Tensor:
        """The rows that came back -> [N, H]: each token's sum."""
        order = self.places.order
        arrived = self.places._replace(num_rows=len(rows), order=None if order is None else order[: len(rows)])
        return collect(rows, arrived, keep=True)


def reached(experts: Tensor, places: int, num_experts: int) -> Tensor:
    """[N, P] bool: the places that hold any of each token's experts [N, K]; those out of range are nowhere."""
    away = (experts < 0) | (experts >= num_experts)
    place = (experts // (num_experts // places)).masked_fill_(away, places).long()
    hit = torch.zeros(len(experts), places + 1, dtype=torch.bool, device=experts.device)
    return hit.scatter_(1, place, True)[:, :places]


def count_pairs(experts: Tensor, num_experts: int) -> Tensor:
    """[E]: how many tokens chose each expert; experts [N, K], of which those out of range count for none."""
    experts = experts.flatten().long()
    experts = experts.where((experts >= 0) & (experts < num_experts), num_experts)
    pairs = torch.zeros(num_experts + 1, dtype=torch.int64, device=experts.device)
    return pairs.scatter_add_(0, experts, torch.ones_like(experts))[:-1]


# --- labels: what travels beside a token ------------------------------------------------------------------------------

INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


def join_labels(weights: Tensor, experts: Tensor) -> Tensor:
    """Mixing weights [N, K] and the experts' numbers [N, K] -> [N, 2K] in the weights' dtype, to travel as one: the
    numbers as the bits of floating-point ones.
    """
    numbers = experts.to(INTEGERS[weights.element_size()]).view(weights.dtype)
    return torch.cat([weights, numbers], dim=1)


def split_labels(labels: Tensor) -> tuple[Tensor, Tensor]:
    """[R, 2K] -> mixing weights [R, K], experts [R, K]."""
    weights, numbers = labels.chunk(2, dim=1)
    return weights, numbers.detach().view(INTEGERS[labels.element_size()])


# --- the receiver's side ----------------------------------------------------------------------------------------------


@dataclass
class Here:
    """What this rank holds: `held` experts beginning with `first`, and the pairs of a row and one of them."""

    first: int
    held: int
    pairs: int


def run_experts(under_way: list[Trip], here: Here, work: ExpertWork) -> Tensor:
    """Labels [R, 2K] under way, and behind them rows [R, H] -> [R, H]: for each row what the experts here make of it.
    Where its assignments go is found out before the row is there.
    """
    labels, rows = under_way
    scale, chosen = split_labels(labels.end())
    places, counts = place(chosen, here.first, here.held, here.pairs, work.alignment)
    scale = spread_scalars(scale, places)
    return collect(work.compute(spread(rows.end(), places), counts, scale), places)
