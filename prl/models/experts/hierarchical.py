"""Expert parallelism beyond a node, in two steps: a token goes once to each *node* that holds any of its experts, to
the rank there with the same place in its node, and from there to the ranks that hold them.

    node 0                 node 1
    rank 0  ------------>  rank 4  --+--> rank 4      between nodes: each rank with those of its place (one rail)
    rank 1  ------------>  rank 5    +--> rank 5      inside: each rank with its node's
    ...                    ...       +--> ...

Back it goes the same way: what a node's experts make of a token is added up at the rank where it arrived (mixing
weights were applied by the experts), and one sum returns. So between nodes travel as many rows as a token has nodes,
where `AllToAllDispatch` sends as many as it has ranks there: with 8 of 256 experts over four nodes of 8 ranks 2.7
instead of 5.4. Known as hierarchical or two-dimensional all-to-all (Tutel, arXiv:2206.03382); DeepEP does the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from prl.models.device import HostCopy
from prl.models.experts.all_to_all import Here, Route, cut, join, join_labels, reached, run_experts, split_labels
from prl.models.experts.dispatch import ExpertWork
from prl.models.experts.trips import Trips


class HierarchicalDispatch:
    """Experts are spread over nodes, and inside each over its ranks; one host synchronisation per call.

    between: the ranks with this one's place in each node of the expert group; inside: those of this node. Neighbouring
    experts are on one rank, neighbouring ranks in one node. pieces: as of `AllToAllDispatch`.
    """

    def __init__(self, between: dist.ProcessGroup, inside: dist.ProcessGroup, pieces: int = 1) -> None:
        self.between, self.inside, self.pieces = between, inside, pieces

    def __call__(self, x: Tensor, weights: Tensor, experts: Tensor, num_experts: int, work: ExpertWork) -> Tensor:
        """As `AllToAllDispatch`."""
        between, inside, nodes = self.between, self.inside, self.between.size()
        node = num_experts // nodes  # experts of a node
        held = node // inside.size()
        shares = [cut(part, self.pieces) for part in (x, weights, experts)]
        routes = [Route.choose(chosen, nodes, num_experts) for chosen in shares[2]]
        counts = [self.count(route, chosen, num_experts) for route, chosen in zip(routes, shares[2], strict=True)]
        sizes = self.exchange_counts(counts)
        labels = [join_labels(*parts) for parts in zip(*shares[1:], strict=True)]
        leaving = [[r.fan_out(label), r.fan_out(x)] for r, label, x in zip(routes, labels, shares[0], strict=True)]
        with Trips() as trips:
            splits = [Splits.read(piece, nodes, inside.size()) for piece in sizes.wait().tolist()]
            over = [
                [trips.begin(part, split.sent, split.received, between) for part in parts]
                for parts, split in zip(leaving, splits, strict=True)
            ]
            work.ahead()
            spreads, there = [], []
            for (labels_over, rows_over), split in zip(over, splits, strict=True):
                label = labels_over.end()
                chosen = split_labels(label)[1] - between.rank() * node
                spread = Route.choose(chosen, inside.size(), node, rows=sum(split.sent_on))
                copies = [spread.fan_out(label), spread.fan_out(rows_over.end())]
                there.append([trips.begin(part, split.sent_on, split.received_on, inside) for part in copies])
                spreads.append(spread)
            back = []
            for parts, split in zip(there, splits, strict=True):
                here = Here((between.rank() * inside.size() + inside.rank()) * held, held, split.pairs)
                back.append(trips.begin(run_experts(parts, here, work), split.received_on, split.sent_on, inside))
            home = []
            for spread, trip, split in zip(spreads, back, splits, strict=True):
                home.append(trips.begin(spread.add_up(trip.end()), split.received, split.sent, between))
            home[-1].meanwhile = work.behind  # the first in backward
            return join([route.add_up(trip.end()) for route, trip in zip(routes, home, strict=True)])

    def count(self, route: Route, experts: Tensor, num_experts: int) -> Tensor:
        """[nodes, 1 + L + E / nodes] of what leaves for each node: rows, rows that go on from there to each of its L
        ranks, and pairs of token and expert.
        """
        nodes, ranks = self.between.size(), self.inside.size()
        on = reached(experts, nodes * ranks, num_experts).sum(0).view(nodes, ranks)
        return torch.cat([route.counts[:, :1], on, route.counts[:, 1:]], dim=1)

    def exchange_counts(self, counts: list[Tensor]) -> HostCopy:
        """Each piece's `count`, over both ways before any row has left.

        On their way to the host are the numbers of `Splits` [pieces, 2 * nodes + 2 * L + 1].
        """
        ranks, pieces = self.inside.size(), len(counts)
        sent = torch.stack(counts, dim=1)  # [nodes, pieces, 1 + L + L * E_local]
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.between)
        on, pairs = received[..., 1:].sum(0).split([ranks, sent.shape[-1] - 1 - ranks], dim=-1)
        sent_on = torch.cat([on[..., None], pairs.view(pieces, ranks, -1)], dim=-1).transpose(0, 1).contiguous()
        received_on = torch.empty_like(sent_on)  # [L, pieces, 1 + E_local]
        dist.all_to_all_single(received_on, sent_on, group=self.inside)
        rows = [sent[..., 0], received[..., 0], sent_on[..., 0], received_on[..., 0]]
        pairs = received_on[..., 1:].sum((0, 2))[:, None]
        return HostCopy(torch.cat([part.T for part in rows] + [pairs], dim=1))


@dataclass(frozen=True)
class Splits:
    """Of one piece: rows to and from each node, rows on to and from each rank of this one, pairs computed here."""

    sent: list[int]
    received: list[int]
    sent_on: list[int]
    received_on: list[int]
    pairs: int

    @classmethod
    def read(cls, numbers: list[int], nodes: int, ranks: int) -> Splits:
        sent, received, rest = numbers[:nodes], numbers[nodes : 2 * nodes], numbers[2 * nodes :]
        return cls(sent, received, rest[:ranks], rest[ranks:-1], rest[-1])
