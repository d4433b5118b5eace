"""Loss curves with and without FP8 side by side: the trainer's own policy on tokens that can be learned."""

from __future__ import annotations

import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from prl.config.schema import RunConfig
from prl.models.device import pick_device
from prl.planning.run_plan import MeshPlan
from prl.trainer.policy import Policy, seed_everything
from prl.trainer.world import build_world, leave_world
from prl.transport.batch import MicroBatch
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch

ALPHABET = 256  # tokens in use
NOISE = 0.1  # share of tokens that follow from nothing
LOSS_TOKENS = 4096  # of a row


def learnable_row(tokens: int, rng: np.random.Generator) -> MicroBatch:
    """One document in which each token follows from the one before, except for some noise."""
    follow = np.random.default_rng(7).permutation(ALPHABET)  # the same rule in every row
    ids = [int(rng.integers(ALPHABET))]
    for noisy, random in zip(rng.random(tokens - 1) < NOISE, rng.integers(0, ALPHABET, tokens - 1), strict=True):
        ids.append(int(random) if noisy else int(follow[ids[-1]]))
    zeros = [0.0] * tokens
    return build_micro_batch([Document(ids, [False] + [True] * (tokens - 1), zeros, zeros, [-1] * tokens)])


def compare_losses(config: RunConfig, steps: int) -> dict[str, Any]:
    """Loss per token of each step without and with FP8, from the same random weights on the same rows."""
    device = pick_device(config.deployment.device)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
    try:
        plain = train(config.model_copy(update={"model": config.model.model_copy(update={"fp8": "none"})}), steps)
        scaled = train(config, steps)
    finally:
        leave_world()
    for step, (a, b) in enumerate(zip(plain, scaled, strict=True), 1):
        print(f"step {step:3d}  {config.model.dtype} {a:.4f}  fp8 {b:.4f}  difference {b - a:+.4f}", flush=True)
    return {"plain": plain, "fp8": scaled}


def train(config: RunConfig, steps: int) -> list[float]:
    seed_everything(config.seed, deterministic=False)
    device = pick_device(config.deployment.device)
    world = build_world(MeshPlan(dp_replicate=1, dp_shard=1, cp=1, ep=1), device)
    policy = Policy(config, config.optim, steps, None, world)
    rng = np.random.default_rng(config.seed)
    history = []
    for step in range(1, steps + 1):
        row = learnable_row(min(config.seq_len, LOSS_TOKENS), rng)
        loss = -policy.forward(row).logp.mean()
        loss.backward()
        policy.optimizer_step(step)
        history.append(loss.item())
    del policy
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return history
