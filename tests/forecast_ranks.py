"""What the trainer's ranks really send in one micro-batch, for tests/test_forecast_bytes.py: `python forecast_ranks.py
DIR RANK SIZE OVERRIDES...`. Rank 0 writes DIR/sent.json: collective -> bytes that it sent to others; and their order.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rank_processes import serve_rank
from torch import Tensor

from prl.config.composing import compose
from prl.config.world import world_of
from prl.planning.run_plan import MeshPlan
from prl.trainer.policy import Policy, seed_everything
from prl.trainer.world import build_world
from prl.transport.documents import Document
from prl.transport.packing import build_micro_batch

HIDDEN = 128  # of the tiny cards
sent: Counter[str] = Counter()
order: list[tuple[str, int]] = []  # gathers, with the bytes that they make, and exchanges of tokens


def counting(name: str, others: Callable[[int, int, Tensor, list[int] | None], float]) -> None:
    """Put a collective of torch.distributed, if this torch has it, behind a counter. others: bytes to others, of the
    group's size, this rank's place, what goes in and how it is split.
    """
    if (inner := getattr(dist, name, None)) is None:
        return
    parameters = inspect.signature(inner)

    def counted(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        tensors = [value for key, value in given.items() if key.startswith("input") and isinstance(value, Tensor)]
        size, rank = dist.get_world_size(given["group"]), dist.get_rank(given["group"])
        sent[name.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")] += round(
            others(size, rank, tensors[0], given.get("input_split_sizes"))
        )
        return inner(*args, **kwargs)

    setattr(dist, name, counted)


def of_gather(size: int, rank: int, piece: Tensor, _: Any) -> float:
    order.append(("gather", piece.nbytes * size))
    return piece.nbytes * (size - 1)


def of_reduction(size: int, rank: int, whole: Tensor, _: Any) -> float:
    return whole.nbytes * (size - 1) / size


def of_exchange(size: int, rank: int, rows: Tensor, splits: list[int] | None) -> float:
    """Heads are exchanged evenly, tokens by split sizes; what goes beside them is not counted: those sizes, mixing
    weights and numbers of experts.
    """
    if splits is None:
        sent["heads"] += rows.nbytes * (size - 1) // size if rows.is_floating_point() else 0
    elif rows.dim() == 2 and rows.shape[1] >= HIDDEN:
        order.append(("tokens", rows.nbytes))
        sent["tokens"] += sum(splits[:rank] + splits[rank + 1 :]) * rows[:1].nbytes
    return 0


def main(directory: Path, rank: int, size: int) -> None:
    config = compose(sys.argv[4:])
    mesh = world_of(config).mesh
    plan = MeshPlan(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp, ep=mesh.ep)
    world = build_world(plan, torch.device("cpu"))
    seed_everything(0, deterministic=False)
    policy = Policy(config, config.optim, 10, None, world)
    numbers = np.random.default_rng(world.data_rank).integers(0, 256, config.seq_len).tolist()
    length = config.seq_len
    document = Document(numbers, [i > 0 for i in range(length)], [0.0] * length, [0.0] * length, [-1] * length)
    for name in ("all_gather_into_tensor", "all_gather_single"):
        counting(name, of_gather)
    for name in ("reduce_scatter_tensor", "reduce_scatter_single"):
        counting(name, of_reduction)
    counting("all_to_all_single", of_exchange)
    policy.forward(build_micro_batch([document]), loss_tokens=length).logp.sum().backward()
    if rank == 0:
        (directory / "sent.json").write_text(json.dumps({**sent, "order": order}))


if __name__ == "__main__":
    serve_rank(main)
