"""What gradients are added up in, in real processes, for tests/test_reduce_dtype.py:
`python reduce_ranks.py DIR RANK SIZE MODEL`.

Rank 0 writes DIR/results.pt; a rank that fails writes DIR/error_<rank>.txt.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_processes import run_script, serve_rank
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from trainer_ranks import Job, build_policy, job_mesh, take_gradients

from prl.trainer.policy import seed_everything
from prl.trainer.world import build_world

LAYOUTS = {
    "fsdp": ["parallelism=fsdp"],
    "hsdp2": ["parallelism=hsdp2"],
    "ddp": ["parallelism=ddp", "deployment.num_train_gpus=4"],
    "ep2, sharded": ["parallelism=ep2", "deployment.num_train_gpus=4"],
    "ep4, whole": ["parallelism.ep=4", "deployment.num_train_gpus=4"],
    "bfloat16": ["parallelism=fsdp", "model.dtype=bfloat16"],
}
DTYPES = ("float32", "bfloat16")


@contextmanager
def bytes_reduced() -> Iterator[Counter[torch.dtype]]:
    """Bytes of gradients that collectives are given, by what they are added up in."""
    given: Counter[torch.dtype] = Counter()
    scatter, everywhere = DefaultReduceScatter.__call__, dist.all_reduce

    def reduce_scatter(self: Any, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *more: Any, **options: Any):
        given[input_tensor.dtype] += input_tensor.nbytes
        return scatter(self, output_tensor, input_tensor, *more, **options)

    def all_reduce(rows: torch.Tensor, *args: Any, **options: Any) -> Any:
        given[rows.dtype] += rows.nbytes if rows.is_floating_point() else 0
        return everywhere(rows, *args, **options)

    DefaultReduceScatter.__call__, dist.all_reduce = reduce_scatter, all_reduce  # type: ignore[method-assign]
    try:
        yield given
        del given[torch.uint8]
    finally:
        DefaultReduceScatter.__call__, dist.all_reduce = scatter, everywhere  # type: ignore[method-assign]


def gradients(model_path: str, *overrides: str) -> dict[str, Any]:
    job = Job(model_path, layout="auto", overrides=list(overrides))
    seed_everything(0, deterministic=False)
    policy = build_policy(job, build_world(job_mesh(job), torch.device("cpu")))
    with bytes_reduced() as given:
        grads = take_gradients(policy, 1)
    return {"bytes": dict(given), "gradients": grads}


def check_all(directory: Path, rank: int, size: int) -> None:
    keys = {dtype: [f"parallelism.reduce_dtype={dtype}"] for dtype in DTYPES} | {"unsaid": []}
    found = {
        (name, dtype): gradients(sys.argv[4], *layout, *key)
        for name, layout in LAYOUTS.items()
        for dtype, key in keys.items()
    }
    if rank == 0:
        torch.save(found, directory / "results.pt")


def run_ranks(directory: Path, model_path: str) -> dict[tuple[str, str], dict[str, Any]]:
    directory.mkdir(parents=True)
    run_script(__file__, directory, 4, model_path)
    return torch.load(directory / "results.pt", weights_only=False)


def main() -> None:
    serve_rank(check_all)


if __name__ == "__main__":
    main()
