"""Small training runs for the trainer's tests: in one process, or as `python trainer_ranks.py DIR RANK SIZE`.

DIR holds jobs.pickle (a list of `Job`); rank 0 writes result_<i>.pt, or error_<rank>.txt.
"""

from __future__ import annotations

import functools
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from families import SIZES, family_card
from rank_processes import run_script, serve_rank
from tiny import VOCAB, moe_card
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from prl.config import compose
from prl.config import world as sizes
from prl.config.schema import OptimConfig, RunConfig
from prl.config.world import shares_prefixes, world_of
from prl.models.checkpoints.writing import hf_tensors
from prl.models.sharding import local_part
from prl.planning.run_plan import MeshPlan
from prl.runtime.directory.checkpoints import commit, parts_of
from prl.trainer import parallelize
from prl.trainer.checkpoint import TrainerCheckpointer
from prl.trainer.memory.activation_offload import apply_activation_offload
from prl.trainer.owned import owned_by
from prl.trainer.policy import Policy, seed_everything
from prl.trainer.world import World, build_world, sum_over_data
from prl.transport.batch import MicroBatch
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch, deal_rows, padding_micro_batch

TESTS = Path(__file__).parent


@dataclass
class Job:
    model_path: str
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    ep: int = 1
    family: str | None = None  # an id of families.SIZES; else Qwen3's mixture of experts, of these sizes
    layout: str | None = None  # a choice of conf/parallelism instead of the four sizes
    experts: int = 4
    layers: int = 2
    moe_size: int = 16  # moe_intermediate_size
    optim: dict[str, Any] = field(default_factory=lambda: {"type": "adamw", "lr": 0.01})
    overrides: list[str] = field(default_factory=list)
    steps: int = 3
    load: str | None = None  # checkpoint directory to go on from, after `start` steps
    start: int = 0
    save: str | None = None  # run directory to save to at the end
    bad: list[int] = field(default_factory=list)  # steps in which the gradients of the first rank are NaN
    left_out: list[int] = field(default_factory=list)  # steps that are not taken at all
    slow: bool = False  # whether the last rank's projections take 40 ms more
    unit_parameters: int | None = None  # that an FSDP unit has at least; None: as shipped
    gradients: bool = False  # those of the first step are a part of the result
    config: RunConfig | None = field(default=None, init=False)  # what `job_config` made of it


def rows_of(step: int, share: bool = False) -> list[MicroBatch]:
    """Three rows of documents of uneven lengths, the same on every rank: data ranks get unequal shares. The first two
    begin alike, for nine tokens; share: and these are run once.
    """
    rng = np.random.default_rng([step, 1])
    rows = []
    for lengths in ((12, 14, 3), (14,), (7, 2)):
        ids = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
        alike = 9 if len(ids) == 3 else 0
        if alike:
            ids[1][:alike] = ids[0][:alike]
        docs = []
        for of_one in ids:
            nothing, mask = [0.0] * len(of_one), [t >= 1 for t in range(len(of_one))]
            docs.append(Document(of_one, mask, nothing, nothing, [-1] * len(of_one)))
        rows.append(build_micro_batch(docs, [0, alike, 0] if share else ()))
    return rows


def job_config(job: Job) -> RunConfig:
    if job.config is None:
        job.config = compose_job(job)
    return job.config


def compose_job(job: Job) -> RunConfig:
    layout = [] if job.layout is None else [f"parallelism={job.layout}", "optim=adamw"]  # rules look at the optimizer
    model = [] if job.family is None else [f"model=tiny_{SIZES[job.family][0]}"]
    config = compose(["warm_start=none", *model, *layout, *job.overrides])
    card = moe_card(num_experts=job.experts, num_hidden_layers=job.layers, moe_intermediate_size=job.moe_size)
    if job.family is not None:
        card = family_card(job.family)
    return config.model_copy(update={"model": config.model.model_copy(update={"card": card})})


def build_policy(job: Job, world: World) -> Policy:
    # activations of these models are small, and must be offloaded all the same
    parallelize.apply_activation_offload = functools.partial(apply_activation_offload, min_bytes=0)
    return Policy(job_config(job), OptimConfig(**job.optim), 10, Path(job.model_path), world)


def job_mesh(job: Job) -> MeshPlan:
    if job.layout is None:
        return MeshPlan(dp_replicate=job.dp_replicate, dp_shard=job.dp_shard, cp=job.cp, ep=job.ep)
    mesh = world_of(job_config(job)).mesh
    return MeshPlan(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp, ep=mesh.ep)


def node_ranks(job: Job) -> int | None:
    """Of its deployment; sizes without a layout are on one node."""
    return None if job.layout is None else world_of(job_config(job)).node_ranks


def train_step(policy: Policy, step: int, bad: bool = False) -> tuple[float, float]:
    """(loss over the world, gradient norm before clipping)"""
    loss = accumulate(policy, step, bad)
    norm = policy.optimizer_step(step).grad_norm
    return sum_over_data(torch.tensor([loss], dtype=torch.float64), policy.world).item(), norm


def accumulate(policy: Policy, step: int, bad: bool = False) -> float:
    """Forward and backward over this rank's rows of a step; its part of the loss."""
    world = policy.world
    # of one process everything is whole
    rows = rows_of(step, share=world.size > 1 and shares_prefixes(policy.config))
    targets = sum(int(row.loss_mask.sum()) for row in rows)
    loss = 0.0
    mine = deal_rows([row.num_tokens for row in rows], world.data_ranks)[world.data_rank]
    for at, index in enumerate(mine, 1):
        micro = rows[index] if index >= 0 else padding_micro_batch(rows[0])
        share = -policy.forward(micro, loss_tokens=targets, last=at == len(mine)).logp.sum() / targets
        (share * float("nan") if bad and world.rank == 0 else share).backward()
        loss += share.item()
    return loss


def take_gradients(policy: Policy, step: int) -> dict[str, Tensor]:
    """Whole ones of a step that is not taken, by parameter, before clipping. A collective of the world."""
    accumulate(policy, step)
    if policy.replicas is not None:
        policy.replicas.finish()
    taken = {}
    for name, param in policy.model.named_parameters():
        if param.grad is not None:
            grad = param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad
            taken[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")] = grad.clone()
            param.grad = None
    return taken


def run_job(job: Job) -> dict[str, Any]:
    """Losses, norms and final weights."""
    world = build_world(job_mesh(job), torch.device("cpu"), node_ranks(job))
    seed_everything(0, deterministic=False)
    shipped = sizes.UNIT_PARAMETERS
    sizes.UNIT_PARAMETERS = shipped if job.unit_parameters is None else job.unit_parameters
    policy = build_policy(job, world)
    sizes.UNIT_PARAMETERS = shipped
    if job.slow and world.rank == world.size - 1:
        slow_down(policy)
    if job.load:
        TrainerCheckpointer(Path(job.load), asynchronous=False).load(Path(job.load), policy.model, policy.optimizers)
    gradients = take_gradients(policy, job.start + 1) if job.gradients else {}
    taken = [step for step in range(job.start + 1, job.start + job.steps + 1) if step not in job.left_out]
    history = [train_step(policy, step, step in job.bad) for step in taken]
    if job.save:
        save(policy, Path(job.save), job.start + job.steps)
    weights = {name: tensor.clone() for name, tensor in hf_tensors(policy.model)}  # adapters are added in
    check_owned(policy, weights)
    blocks = {name: tensor.clone() for name, tensor in hf_tensors(policy.model, torch.bfloat16, in_blocks=True)}
    assert {tensor.dtype for tensor in blocks.values()} >= {torch.float8_e4m3fn, torch.float32}
    check_owned(policy, blocks, torch.bfloat16, in_blocks=True)
    experts = [param for module in parallelize.expert_modules(policy.model) for param in module.parameters()]
    held = sum(local_part(param).numel() * param.element_size() for param in experts)
    found = {"history": history, "weights": weights, "gradients": gradients, "fsdp_units": count_units(policy)}
    return found | {"random": torch.rand(3), "expert_bytes": held, "figures": policy.figures}


def count_units(policy: Policy) -> int:
    """How many FSDP has of layers."""
    states = {id(layer._get_fsdp_state()) for layer in policy.model.layers if isinstance(layer, FSDPModule)}
    return len(states)


def slow_down(policy: Policy) -> None:
    for layer in policy.model.layers:
        layer.project = lambda *inputs, project=layer.project: (time.sleep(0.04), project(*inputs))[1]


def check_owned(
    policy: Policy, weights: dict[str, Tensor], dtype: torch.dtype | None = None, in_blocks: bool = False
) -> None:
    """What this rank says that it holds of the gathered `weights` it does, and all ranks hold all."""
    owned = owned_by(policy.model, dtype, policy.world, in_blocks)
    assert owned.table.names == list(weights)
    assert in_blocks is False or owned.table.dtypes == [str(one.dtype)[len("torch.") :] for one in weights.values()]
    assert owned.table.shapes == [list(whole.shape) for whole in weights.values()]
    for box, part in zip(owned.boxes.tolist(), owned.parts(), strict=True):
        number, row, rows, column, columns = box
        whole = weights[owned.table.names[number]]
        matrix = whole.reshape(int(owned.table.rows[number]), int(owned.table.columns[number]))
        part, matrix = part.reshape(rows, columns).to(matrix.dtype), matrix[row : row + rows, column : column + columns]
        assert torch.equal(part.contiguous().view(torch.uint8), matrix.contiguous().view(torch.uint8))
    everyones: list[Any] = [None] * policy.world.size
    if policy.world.size > 1:
        dist.all_gather_object(everyones, owned.boxes)
    else:
        everyones = [owned.boxes]
    once = np.unique(np.concatenate(everyones), axis=0)
    held = np.bincount(once[:, 0], once[:, 2] * once[:, 4], len(weights))
    assert held.tolist() == [whole.numel() for whole in weights.values()]


def save(policy: Policy, run_dir: Path, step: int, asynchronous: bool = False) -> None:
    checkpointer = TrainerCheckpointer(run_dir, asynchronous)
    checkpointer.save(step, policy.model, policy.optimizers)
    assert checkpointer.finish(wait=True) == step
    if policy.world.is_main:
        commit(run_dir, step, keep=5, parts=parts_of("sft"))
    dist.barrier()  # before anybody loads it


def run_ranks(directory: Path, size: int, jobs: list[Job]) -> list[dict[str, Any]]:
    """Run jobs one after another in a world of `size` processes."""
    directory.mkdir(parents=True)
    for job in jobs:
        job_config(job)  # once, and not in each rank
    (directory / "jobs.pickle").write_bytes(pickle.dumps(jobs))
    run_script(__file__, directory, size)
    return [torch.load(directory / f"result_{i}.pt", weights_only=True) for i in range(len(jobs))]


def run_all(directory: Path, rank: int, size: int) -> None:
    for index, job in enumerate(pickle.loads((directory / "jobs.pickle").read_bytes())):
        result = run_job(job)
        if rank == 0:
            torch.save(result, directory / f"result_{index}.pt")


def main() -> None:
    serve_rank(run_all)


if __name__ == "__main__":
    main()
