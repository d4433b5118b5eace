"""Run as one process for each rank: an all_reduce, and from the first rank how fast it was, as one line of JSON."""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta

REPEATS = 3
ELEMENTS = {"gloo": 2**20, "nccl": 2**26}  # float32: 4 MiB and 256 MiB


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=list(ELEMENTS))
    parser.add_argument("rank", type=int)
    parser.add_argument("world", type=int)
    parser.add_argument("store", help="a file, not there yet, through which the ranks meet")
    parser.add_argument("limit_s", type=float)
    arguments = parser.parse_args()
    import torch
    import torch.distributed as dist

    dist.init_process_group(
        arguments.backend,
        init_method=f"file://{arguments.store}",
        rank=arguments.rank,
        world_size=arguments.world,
        timeout=timedelta(seconds=arguments.limit_s),
    )
    device = torch.device("cuda", arguments.rank) if arguments.backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    times = []
    for _ in range(REPEATS):
        values = torch.full((ELEMENTS[arguments.backend],), arguments.rank + 1.0, device=device)
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(values)
        wrong = bool((values != arguments.world * (arguments.world + 1) / 2).any())  # waits for the device
        times.append(time.monotonic() - began)
        assert not wrong, f"{arguments.backend}: the sum over {arguments.world} ranks is not what it should be"
    moved = values.numel() * values.element_size() * 2 * (arguments.world - 1) / arguments.world
    dist.destroy_process_group()
    print(json.dumps({"ranks": arguments.world, "gb_per_s": moved / min(times) / 1e9}), flush=True)


if __name__ == "__main__":
    main()
