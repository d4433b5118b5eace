"""Experts over several nodes in real processes, for tests/test_hierarchical.py:
`python hierarchical_ranks.py DIR RANK SIZE MODEL NODES`: SIZE ranks are NODES nodes.

Rank 0 writes DIR/results.pt; a rank that fails writes DIR/error_<rank>.txt.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import run_script, serve_rank
from tiny import VOCAB
from trainer_ranks import Job, build_policy, job_config, job_mesh

from prl.config.world import world_of
from prl.models.experts.all_to_all import AllToAllDispatch
from prl.models.experts.hierarchical import HierarchicalDispatch
from prl.models.experts.stacked import Dispatch, Experts
from prl.planning.run_plan import MeshPlan
from prl.trainer.policy import seed_everything
from prl.trainer.world import build_world, cut_at_nodes
from prl.transport.batch import MicroBatch
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch

EXPERTS, TOP_K, HIDDEN = 16, 4, 10
CASES = ("even", "uneven", "nobody", "one node", "one rank", "limited")


def routed_tokens(case: str, rank: int, nodes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, H], weights [N, K], experts [N, K] of this rank.

    uneven: every other rank has two tokens, and one none; nobody: no rank has any; one node, one rank: all tokens want
    what is there; limited: each token wants experts of one node, its own or another.
    """
    generator = torch.Generator().manual_seed(10 + rank)
    count = {"nobody": 0, "uneven": (9, 2, 0, 5)[rank % 4]}.get(case, 11)
    reach = {"one node": EXPERTS // nodes, "one rank": TOP_K, "limited": EXPERTS // nodes}.get(case, EXPERTS)
    experts = torch.rand(count, reach, generator=generator).topk(TOP_K).indices
    if case == "limited":
        experts += torch.randint(0, nodes, (count, 1), generator=generator) * reach
    x = torch.randn(count, HIDDEN, generator=generator)
    return x.requires_grad_(), torch.rand(count, TOP_K, generator=generator).requires_grad_(), experts


def run_dispatch(dispatch: Dispatch, case: str, rank: int, size: int, nodes: int) -> dict[str, torch.Tensor]:
    """Output and gradients of a loss that differs by rank and token."""
    experts = Experts(EXPERTS, HIDDEN, 12)
    for name, param in list(experts.named_parameters()):
        param.data.normal_(generator=torch.Generator().manual_seed(len(name)))
        setattr(experts, name, torch.nn.Parameter(param.data.chunk(size)[rank].clone()))
    experts.dispatch = dispatch
    x, weights, chosen = routed_tokens(case, rank, nodes)
    y = experts(x, weights, chosen)
    (y.square() * torch.arange(1, len(y) + 1)[:, None] * (rank + 1)).sum().backward()
    grads = {name: param.grad for name, param in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


@contextmanager
def rows_sent(rank: int, per_node: int, width: int) -> Iterator[Counter[str]]:
    """Rows of `width` numbers that this rank sends to other nodes, and inside its own to others."""
    sent: Counter[str] = Counter()
    plain = dist.all_to_all_single

    def counting(
        target: Any, rows: Any, received: Any = None, splits: Any = None, group: Any = None, **more: Any
    ) -> Any:
        if rows.shape[1:] == (width,):
            for other, count in zip(dist.get_process_group_ranks(group), splits, strict=True):
                if other != rank:
                    sent["inside" if other // per_node == rank // per_node else "between"] += count
        return plain(target, rows, received, splits, group=group, **more)

    dist.all_to_all_single = counting
    try:
        yield sent
    finally:
        dist.all_to_all_single = plain


def compare_dispatches(rank: int, size: int, nodes: int) -> dict[tuple[str, str], dict[str, Any]]:
    world = build_world(MeshPlan(dp_replicate=1, dp_shard=size, cp=1, ep=size), torch.device("cpu"), size // nodes)
    mesh = cut_at_nodes(world)
    groups = mesh.get_group("nodes"), mesh.get_group("ranks")
    dispatches = {
        "all_to_all": AllToAllDispatch(dist.group.WORLD),
        "hierarchical": HierarchicalDispatch(*groups),
        "again": HierarchicalDispatch(*groups),
        "pieces": HierarchicalDispatch(*groups, pieces=3),
    }
    found = {}
    for case in CASES:
        for name, dispatch in dispatches.items():
            with rows_sent(rank, size // nodes, HIDDEN) as sent:
                results = run_dispatch(dispatch, case, rank, size, nodes)
            found[case, name] = results | {"sent": dict(sent), "experts": routed_tokens(case, rank, nodes)[2]}
    return found


# --- in training ------------------------------------------------------------------------------------------------------


def replayed_row(rank: int, layers: int, experts: int, top_k: int) -> MicroBatch:
    """Of documents whose experts somebody else has chosen; another for each rank."""
    rng = np.random.default_rng(rank)
    n = 5 + 3 * rank
    chosen = np.stack([rng.permutation(experts)[:top_k] for _ in range(n * layers)]).reshape(n, layers, top_k)
    ids = rng.integers(0, VOCAB, n).tolist()
    mask = [i >= 1 for i in range(n)]
    return build_micro_batch([Document(ids, mask, [0.0] * n, [0.0] * n, [-1] * n, [chosen.astype(np.uint8)])])


def train(model_path: str, size: int, nodes: int, backend: str, *more: str) -> dict[str, torch.Tensor]:
    """Loss and gradients of one replayed row a rank, through FSDP and recomputation; "between": rows that all ranks
    sent to other nodes.
    """
    several = ["deployment=multi_node", f"deployment.gpus_per_node={size // nodes}"]
    overrides = [*several, f"deployment.num_train_nodes={nodes}", f"parallelism.ep_comm_backend={backend}", *more]
    job = Job(model_path, layout="ep8", experts=8, overrides=[*overrides, f"parallelism.ep={size}"])
    config = job_config(job)
    seed_everything(0, deterministic=False)
    policy = build_policy(job, build_world(job_mesh(job), torch.device("cpu"), world_of(config).node_ranks))
    row = replayed_row(dist.get_rank(), config.model.card.num_hidden_layers, 8, config.model.card.num_experts_per_tok)
    with rows_sent(dist.get_rank(), size // nodes, config.model.card.hidden_size) as sent:
        loss = -policy.forward(row).logp.sum()
        loss.backward()
    between = torch.tensor(sent["between"])
    dist.all_reduce(between)
    grads = {name: param.grad.full_tensor() for name, param in policy.model.named_parameters()}
    return {"between": between, "loss": loss.detach()} | {
        name.replace("_orig_mod.", ""): grad for name, grad in grads.items()
    }


TRAINED = {
    "all_to_all": ("torch",),
    "plain": ("hierarchical",),
    "ac full": ("hierarchical", "memory_recipe.ac.mode=full"),
    "ac moe, pieces": (
        "hierarchical", "memory_recipe.ac={mode: selective, targets: [moe]}", "parallelism.ep_pieces=3",
    ),
}  # fmt: skip


def check_all(directory: Path, rank: int, size: int) -> None:
    model_path, nodes = sys.argv[4], int(sys.argv[5])
    results: dict[str, Any] = {"dispatch": [None] * size}
    dist.all_gather_object(results["dispatch"], compare_dispatches(rank, size, nodes))
    results["trained"] = {name: train(model_path, size, nodes, *job) for name, job in TRAINED.items()}
    if rank == 0:
        torch.save(results, directory / "results.pt")


def run_ranks(directory: Path, size: int, nodes: int, model_path: str) -> dict[str, Any]:
    directory.mkdir(parents=True)
    run_script(__file__, directory, size, model_path, str(nodes))
    return torch.load(directory / "results.pt", weights_only=False)


def main() -> None:
    serve_rank(check_all)


if __name__ == "__main__":
    main()
