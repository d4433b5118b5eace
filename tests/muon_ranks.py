"""Muon's steps in real processes, for tests/test_muon.py: `python muon_ranks.py DIR RANK SIZE`.

Every rank writes DIR/found_<rank>.pt.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rank_processes import serve_rank
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from prl.trainer import muon

# the last three have fewer rows than ranks, or do not divide by them; the first stand for layers that are alike
SHAPES = [(32, 16)] * 5 + [(16, 32)] * 3 + [(16, 16)] * 2 + [(2, 8), (7, 5), (9, 30)]
STEPS = 3
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1 + step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train_on(mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], list[tuple[tuple[int, ...], list[int]]]]:
    """Whole weights after STEPS, and of every stack of the last step its shape and how many each rank owned."""
    placements = [Replicate()] * (len(mesh_shape) - 1) + [Shard(0)]
    mesh = init_device_mesh("cpu", mesh_shape)
    params = [torch.nn.Parameter(distribute_tensor(weight, mesh, placements)) for weight in weights()]
    optimizer = muon.Muon(params, **OPTIONS)
    for step in range(STEPS):
        for param, gradient in zip(params, gradients(step), strict=True):
            param.grad = distribute_tensor(gradient, mesh, placements)
        owned = [(tuple(stack.params[0].shape), stack.owned) for stack in optimizer.stacks()]
        optimizer.step()
    return [param.detach().full_tensor() for param in params], owned


def work(directory: Path, rank: int, size: int) -> None:
    found = {}
    for name, limit in (("whole", muon.STACK_BYTES), ("in many stacks", 2048)):
        muon.STACK_BYTES = limit
        found["fsdp", name] = train_on((size,))
    if size == 4:
        found["hsdp", "whole"] = train_on((2, 2))
    torch.save(found, directory / f"found_{rank}.pt")


if __name__ == "__main__":
    serve_rank(work)
