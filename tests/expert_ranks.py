"""Expert parallelism in real processes, for tests/test_expert_parallel.py: `python expert_ranks.py DIR RANK SIZE`.

Rank 0 writes DIR/results.pt; a rank that fails writes DIR/error_<rank>.txt.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import run_script, serve_rank
from trainer_ranks import Job, build_policy, job_config, job_mesh, rows_of, save
from trainer_ranks import train_step as plain_step

from prl.config.schema import OptimConfig
from prl.models.experts.all_to_all import AllToAllDispatch
from prl.models.experts.deepep import DeepEPDispatch
from prl.models.experts.dispatch import LocalDispatch
from prl.models.experts.stacked import Experts
from prl.trainer.checkpoint import TrainerCheckpointer
from prl.trainer.expert_balance import ExpertBalance
from prl.trainer.policy import Policy, seed_everything
from prl.trainer.world import World, build_world
from prl.transport.packing import deal_rows, padding_micro_batch

TESTS = Path(__file__).parent
EXPERTS, TOP_K, HIDDEN = 6, 3, 8
# tokens of each of two ranks; "skewed": all of them to the first rank's experts
TOKENS = {"even": (9, 9), "uneven": (11, 2), "single": (7, 1), "skewed": (6, 5)}
RATE = 0.05


def local_experts(rank: int, size: int) -> tuple[Experts, Experts]:
    """All experts, and this rank's share of them, float64."""
    everything = Experts(EXPERTS, HIDDEN, 12).double()
    generator = torch.Generator().manual_seed(1)
    for param in everything.parameters():
        param.data.normal_(generator=generator)
    share = Experts(EXPERTS, HIDDEN, 12).double()
    for name, param in everything.named_parameters():
        setattr(share, name, torch.nn.Parameter(param.data.chunk(size)[rank].clone()))
    return everything, share


def routed_tokens(case: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [N, H], weights [N, K] float32, experts [N, K]: this rank's."""
    generator = torch.Generator().manual_seed(10 + rank)
    n = TOKENS[case][rank]
    reach = EXPERTS // 2 if case == "skewed" else EXPERTS
    experts = torch.rand(n, reach, generator=generator).topk(TOP_K).indices
    x = torch.randn(n, HIDDEN, generator=generator, dtype=torch.float64)
    return x.requires_grad_(), torch.rand(n, TOP_K, generator=generator).requires_grad_(), experts


def run_dispatch(experts: Experts, case: str, rank: int) -> dict[str, torch.Tensor]:
    """Output and gradients of a loss that differs by rank and token."""
    x, weights, chosen = routed_tokens(case, rank)
    y = experts(x, weights.to(x.dtype), chosen)
    (y.square() * torch.arange(1, len(y) + 1)[:, None] * (rank + 1)).sum().backward()
    grads = {name: param.grad for name, param in experts.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "weights": weights.grad, **grads}


def compare_dispatches(rank: int, size: int) -> dict[tuple[str, str], dict[str, Any]]:
    """By (case, dispatch): results, with the weights' gradients of all ranks; and the calls that DeepEP saw."""
    sys.path.insert(0, str(TESTS / "stand_ins"))
    group = dist.group.WORLD
    found = {}
    for case in TOKENS:
        for name, dispatch in {
            "local": LocalDispatch(),
            "all_to_all": AllToAllDispatch(group),
            "all_to_all_3": AllToAllDispatch(group, pieces=3),
            "deepep": DeepEPDispatch(group, 20, None),
            "deepep_chunk4": DeepEPDispatch(group, 24, 4),
        }.items():
            everything, share = local_experts(rank, size)
            experts = everything if name == "local" else share
            experts.dispatch = dispatch
            results: dict[str, Any] = run_dispatch(experts, case, rank)
            for param in ("gate_up_proj", "down_proj"):
                if name == "local":
                    dist.all_reduce(results[param])
                else:
                    parts = [torch.empty_like(results[param]) for _ in range(size)]
                    dist.all_gather(parts, results[param])
                    results[param] = torch.cat(parts)
            if isinstance(dispatch, DeepEPDispatch):
                results["calls"] = dispatch.buffer.calls
                results["bytes"] = dispatch.buffer.num_nvl_bytes
            found[case, name] = results
    return found


FAMILIES = ("deepseek_v3", "nemotron_h", "glm_moe_dsa shared choices", "minimax_m2")


def train_by_backend(
    model_path: str,
    family: str | None = None,
    ways: tuple[tuple[str, int], ...] = (("torch", 1), ("torch", 3), ("deepep", 1)),
) -> dict[tuple[str, int], list[tuple[float, float]]]:
    """Losses and gradient norms by backend and number of pieces, through FSDP and recomputation."""
    histories = {}
    for backend, pieces in ways:
        job = Job(model_path, family=family, dp_shard=2, ep=2, overrides=["memory_recipe.ac.mode=full"])
        config = job_config(job)
        changes = {"ep_comm_backend": backend, "deepep_token_chunk_size": 6, "ep_pieces": pieces}
        config = config.model_copy(update={"parallelism": config.parallelism.model_copy(update=changes)})
        seed_everything(0, deterministic=False)
        world = build_world(job_mesh(job), torch.device("cpu"))
        policy = Policy(config, OptimConfig(**job.optim), 10, Path(model_path), world)
        histories[backend, pieces] = [plain_step(policy, step) for step in (1, 2)]
    return histories


# --- balance ----------------------------------------------------------------------------------------------------------


def train_step(policy: Policy, balance: ExpertBalance, step: int) -> tuple[torch.Tensor, dict[str, float]]:
    """Tokens per expert over the world, before the balance clears them, and its figures."""
    world, rows = policy.world, rows_of(step)
    for index in deal_rows([row.num_tokens for row in rows], world.data_ranks)[world.data_rank]:
        micro = rows[index] if index >= 0 else padding_micro_batch(rows[0])
        balance.expect(bool(micro.loss_mask.any()))
        (-policy.forward(micro).logp.sum() / 30).backward()
    policy.optimizer_step(step)
    counts = balance.load.counts.clone()
    dist.all_reduce(counts)
    return counts, balance.step()


def biases(balance: ExpertBalance) -> torch.Tensor:
    return torch.stack([mlp.router_bias for mlp in balance.layers.values()]).clone()


def start(job: Job) -> tuple[Policy, ExpertBalance]:
    world: World = build_world(job_mesh(job), torch.device("cpu"))
    seed_everything(0, deterministic=False)
    policy = build_policy(job, world)
    return policy, ExpertBalance(policy.model, world, RATE)


def run_balance(job: Job) -> dict[str, Any]:
    policy, balance = start(job)
    steps = [train_step(policy, balance, step) for step in range(1, job.steps + 1)]
    if job.save:
        save(policy, Path(job.save), job.steps)
    return {"counts": [c for c, _ in steps], "figures": [f for _, f in steps], "biases": biases(balance)}


def load_biases(job: Job) -> torch.Tensor:
    policy, balance = start(job)
    TrainerCheckpointer(Path(job.load), asynchronous=False).load(Path(job.load), policy.model, policy.optimizers)
    return biases(balance)


# --- processes --------------------------------------------------------------------------------------------------------


def run_ranks(directory: Path, size: int, model_path: str) -> dict[str, Any]:
    directory.mkdir(parents=True)
    run_script(__file__, directory, size, model_path, limit_s=500)
    return torch.load(directory / "results.pt", weights_only=False)


def check_all(directory: Path, rank: int, size: int) -> None:
    model_path = sys.argv[4]
    results: dict[str, Any] = {"dispatch": [None] * size}
    dist.all_gather_object(results["dispatch"], compare_dispatches(rank, size))
    recompute = ["memory_recipe.ac.mode=full"]
    job = Job(model_path, dp_shard=2, ep=2, overrides=recompute, save=str(directory / "run"))
    results["backends"] = train_by_backend(model_path)
    for name in FAMILIES:
        path = str(Path(model_path).parent / name)
        results["backends", name] = train_by_backend(path, name, (("torch", 1), ("deepep", 1)))
    results["balance"] = run_balance(job)
    checkpoint = str(directory / "run" / "checkpoints" / f"step_{job.steps}")
    results["loaded"] = load_biases(Job(model_path, dp_shard=2, load=checkpoint))
    if rank == 0:
        torch.save(results, directory / "results.pt")


def main() -> None:
    serve_rank(check_all)


if __name__ == "__main__":
    main()
