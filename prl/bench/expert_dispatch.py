"""`python -m prl.bench.expert_dispatch [--help]`: what a token costs on its way to experts on several nodes and back,
by all-to-all and by hierarchical dispatch.

Each rank is a process; nodes of 8 ranks are told apart by the ranks' numbers. Tokens choose experts at random, freely
or in half of 8 groups (DeepSeek-V3, arXiv:2412.19437, section 2.1.2), and make the whole way: out and back, and their
gradients out and back. A wrapper around the collective counts the bytes that leave for another rank of the same node
and for other nodes. What is counted follows from the choices; that it does is checked, and more nodes than there are
processes for are worked out so. Times are arithmetic.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from prl.bench.arguments import parser_of, user_errors_told
from prl.bench.processes import Processes
from prl.config.arguments import a_count
from prl.models.experts.all_to_all import AllToAllDispatch, reached
from prl.models.experts.dispatch import ExpertWork
from prl.models.experts.hierarchical import HierarchicalDispatch
from prl.models.experts.routing import Choice, route
from prl.models.experts.stacked import Dispatch

NODE, TOP_K, GROUPS, KEPT = 8, 8, 8, 4
MODELS = {"Qwen3-235B-A22B": (128, 4096), "DeepSeek-V3": (256, 7168)}  # experts, hidden size
ROUTINGS = {"free": Choice(TOP_K), "4 of 8 groups": Choice(TOP_K, groups=GROUPS, kept_groups=KEPT)}
WAYS = ("all-to-all", "hierarchical")
CASES = tuple(itertools.product(MODELS, ROUTINGS, WAYS))
NETWORK, NVLINK = 50e9, 300e9  # bytes per second of one GPU: a NIC of 400 Gb/s; what all-to-all reached in a node
LONG = 16_384  # tokens of a rank, for times


@dataclass
class Sent:
    """Bytes that leave a rank, or all ranks together."""

    between: float = 0.0
    inside: float = 0.0

    def __add__(self, other: Sent) -> Sent:
        return Sent(self.between + other.between, self.inside + other.inside)

    def times(self, factor: float) -> Sent:
        return Sent(self.between * factor, self.inside * factor)


def choices(model: str, routing: str, tokens: int, rank: int) -> Tensor:
    """Experts [tokens, TOP_K] of a rank's tokens."""
    logits = torch.randn(tokens, MODELS[model][0], generator=torch.Generator().manual_seed(rank))
    return route(logits, ROUTINGS[routing])[1]


# --- worked out -------------------------------------------------------------------------------------------------------


def work_out(model: str, routing: str, way: str, tokens: int, nodes: int) -> Sent:
    """Of all ranks, from what their tokens chose."""
    experts, hidden = MODELS[model]
    rows = Sent()
    for rank in range(nodes * NODE):
        chosen = choices(model, routing, tokens, rank)
        rows += count_rows(reached(chosen, nodes * NODE, experts).view(tokens, nodes, NODE), rank, way)
    # a row makes four ways; its mixing weights two, bfloat16 both; its experts one, int32
    return rows.times(4 * hidden * 2 + 2 * TOP_K * 2 + TOP_K * 4)


def count_rows(ranks: Tensor, rank: int, way: str) -> Sent:
    """Rows that leave for other ranks to reach ranks [N, nodes, NODE] bool, with those that others send on."""
    node, place = divmod(rank, NODE)
    if way == "all-to-all":
        own = ranks[:, node].sum()
        return Sent(float(ranks.sum() - own), float(own - ranks[:, node, place].sum()))
    reached_nodes = ranks.any(-1)
    between = reached_nodes.sum() - reached_nodes[:, node].sum()
    return Sent(float(between), float(ranks.sum() - ranks[:, :, place].sum()))


# --- measured ---------------------------------------------------------------------------------------------------------


@contextmanager
def counted(rank: int) -> Iterator[Sent]:
    """What this rank sends; the exchange of counts, of the same size for any number of tokens, is left out."""
    sent, plain = Sent(), dist.all_to_all_single

    def counting(target: Tensor, rows: Tensor, received: Any = None, splits: Any = None, **options: Any) -> Any:
        if splits is not None:
            row_bytes = rows[:1].nbytes if len(rows) else 0
            for other, count in zip(dist.get_process_group_ranks(options["group"]), splits, strict=True):
                if other // NODE != rank // NODE:
                    sent.between += count * row_bytes
                elif other != rank:
                    sent.inside += count * row_bytes
        return plain(target, rows, received, splits, **options)

    dist.all_to_all_single = counting  # type: ignore[assignment]
    try:
        yield sent
    finally:
        dist.all_to_all_single = plain


def make_the_way(dispatch: Dispatch, model: str, routing: str, tokens: int, rank: int) -> Sent:
    """Forward and backward of a layer whose experts change nothing but the scale."""
    experts, hidden = MODELS[model]
    x = torch.randn(tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.full((tokens, TOP_K), 1 / TOP_K, dtype=torch.bfloat16, requires_grad=True)
    chosen = choices(model, routing, tokens, rank)
    with counted(rank) as sent:
        y = dispatch(x, weights, chosen, experts, ExpertWork(lambda rows, counts, scale: rows * scale[:, None]))
        y.sum().backward()
    return sent


def serve_rank(store: str, rank: int, nodes: int, tokens: int, port: Connection) -> None:
    """A process: one rank, which tells what it sent in each of CASES."""
    size = nodes * NODE
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    mesh, everybody = init_device_mesh("cpu", (nodes, NODE), mesh_dim_names=("nodes", "ranks")), dist.group.WORLD
    assert everybody is not None
    dispatches: dict[str, Dispatch] = {
        "all-to-all": AllToAllDispatch(everybody),
        "hierarchical": HierarchicalDispatch(mesh.get_group("nodes"), mesh.get_group("ranks")),
    }
    port.send([make_the_way(dispatches[way], model, routing, tokens, rank) for model, routing, way in CASES])
    dist.barrier()
    dist.destroy_process_group()


def measure(nodes: int, tokens: int) -> list[Sent]:
    """Of all ranks together, for each of CASES. Raises UserError when a process has died."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, Processes("fork") as processes:  # nobody imports torch anew
        store, ranks = str(Path(directory) / "store"), range(nodes * NODE)
        for rank in ranks:
            processes.start(f"rank {rank}", serve_rank, store, rank, nodes, tokens)
        told = [processes.hear(rank) for rank in ranks]
        for rank in ranks:
            processes.started[rank].join()
    return [sum(sent, Sent()) for sent in zip(*told, strict=True)]


# --- the table --------------------------------------------------------------------------------------------------------


def seconds(sent: Sent, way: str) -> float:
    """Of one token: all-to-all uses both links at once, hierarchical dispatch one after the other."""
    network, nvlink = sent.between / NETWORK, sent.inside / NVLINK
    return max(network, nvlink) if way == "all-to-all" else network + nvlink


def table(found: dict[tuple[int, bool], list[Sent]], tokens: int) -> list[str]:
    """One line for each model, routing and number of nodes."""
    lines = [
        "| model | experts chosen | nodes | KiB a token between nodes | inside | ms for 16,384 tokens |",
        "|---|---|---|---|---|---|",
    ]
    for model, routing in itertools.product(MODELS, ROUTINGS):
        for (nodes, measured), sent in found.items():
            cells = {way: sent[CASES.index((model, routing, way))].times(1 / (nodes * NODE * tokens)) for way in WAYS}
            pairs = [
                " -> ".join(f"{figure(cells[way], way):.{digits}f}" for way in WAYS)
                for digits, figure in (
                    (0, lambda cell, way: cell.between / 1024),
                    (0, lambda cell, way: cell.inside / 1024),
                    (1, lambda cell, way: seconds(cell, way) * LONG * 1e3),
                )
            ]
            told = f"{nodes}" if measured else f"{nodes}, not run"
            lines.append(f"| {model} | {routing} | {told} | {' | '.join(pairs)} |")
    return lines


def main() -> None:
    parser = parser_of("expert_dispatch", __doc__)
    parser.add_argument("--tokens", type=a_count, default=64, help="of each rank (default: 64)")
    parser.add_argument("--nodes", type=a_count, nargs="*", default=[2, 4], help="of 8 processes (default: 2 4)")
    parser.add_argument("--counted", type=a_count, nargs="*", default=[8], help="worked out alone (default: 8)")
    arguments = parser.parse_args()
    if not arguments.nodes and not arguments.counted:
        parser.error("--nodes and --counted: one of them names a number of nodes")
    with user_errors_told():
        found = {(nodes, True): measure(nodes, arguments.tokens) for nodes in arguments.nodes}
    for (nodes, _), sent in found.items():
        expected = [work_out(*case, arguments.tokens, nodes) for case in CASES]
        assert sent == expected, f"{sent} were sent over {nodes} nodes; the choices ask for {expected}"
    for nodes in arguments.counted:
        found[nodes, False] = [work_out(*case, arguments.tokens, nodes) for case in CASES]
    print("\n".join(table(found, arguments.tokens)))


if __name__ == "__main__":
    main()
