"""`python -m prl.bench.publication_host [--help]`: a model through host memory, from several trainer ranks to engines.

All are processes on this host. Ranks hold rows of float32 matrices, as FSDP cuts them, which travel in bfloat16; each
engine fetches, checks and puts together the whole.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from prl.bench.arguments import parser_of
from prl.config.arguments import a_count

ROWS, COLUMNS = 4096, 4096
GIB = 1 << 30


def train(kind: str, count: int, rank: int, ranks: int, directory: str, pipe: Connection) -> None:
    """One rank. Pipe: the update, seconds and its peak."""
    import torch.distributed as dist

    from prl.config.schema import WeightTransportConfig
    from prl.trainer.world import gather_bytes
    from prl.transport.boxes import ROW, Table
    from prl.transport.boxes import ROWS as BOX_ROWS
    from prl.transport.weights import make_publisher
    from prl.transport.weights_files import FilesystemPublisher

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{directory}/store", ranks), rank=rank, world_size=ranks)
    matrix = torch.empty(ROWS, COLUMNS, dtype=torch.bfloat16, device="meta")
    table = Table.of((f"w{i}", matrix) for i in range(count))
    boxes = table.whole()
    boxes[:, BOX_ROWS] //= ranks
    boxes[:, ROW] = rank * boxes[:, BOX_ROWS]
    shards = [torch.full((ROWS // ranks, COLUMNS), float(i)) for i in range(count)]
    segments = Path(f"/dev/shm/prl-bench{os.getppid()}")
    config = WeightTransportConfig(type=kind)
    publisher = make_publisher(config, Path(directory) / "weights", segments, "127.0.0.1", rank, gather_bytes)
    assert not isinstance(publisher, FilesystemPublisher)
    publisher.hold(table, boxes)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    publisher.publish(1, shards, pipe.send)
    seconds = time.perf_counter() - began
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pipe.send((seconds, more * 1024 / GIB))
    pipe.recv()  # engines have it
    publisher.acknowledge()
    pipe.send(None)


def serve(pipe: Connection) -> None:
    from prl.transport.weights import receive

    torch.set_num_threads(1)
    info = pipe.recv()
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    got = list(receive(info))
    seconds = time.perf_counter() - began
    for i, (name, tensor) in enumerate(got):
        assert name == f"w{i}"
        assert bool((tensor == float(i)).all()), f"{name} is wrong"
    more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    pipe.send((seconds, more * 1024 / GIB))


def measure(kind: str, mib: int, ranks: int, engines: int) -> dict[str, float]:
    """`mib`: of the model, as it travels."""
    context, count = multiprocessing.get_context("spawn"), max(1, (mib << 20) // (ROWS * COLUMNS * 2))
    with tempfile.TemporaryDirectory() as directory:
        started: list[tuple[Any, Connection]] = []
        for target, arguments in [(train, (kind, count, r, ranks, directory)) for r in range(ranks)] + [
            (serve, ()) for _ in range(engines)
        ]:
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        trainers, takers = [pipe for _, pipe in started[:ranks]], [pipe for _, pipe in started[ranks:]]
        info = trainers[0].recv()
        for pipe in takers:
            pipe.send(info)
        taken, given = [pipe.recv() for pipe in takers], [pipe.recv() for pipe in trainers]
        for pipe in trainers:
            pipe.send(None)
        for pipe in trainers:
            pipe.recv()
        for process, _ in started:
            process.join()
    return {
        "seconds until engines hear of it": given[0][0],
        "seconds until all have it": max(seconds for seconds, _ in taken),
        "memory of the first rank besides its shards, GiB": given[0][1],
        "most memory of a rank besides its shards, GiB": max(more for _, more in given),
    }


def main() -> None:
    parser = parser_of("publication_host", __doc__)
    parser.add_argument("--transport", choices=["tcp", "shared_memory"], default="tcp", help="default: tcp")
    for name, value in {"mib": 2048, "ranks": 4, "engines": 2}.items():
        parser.add_argument(f"--{name}", type=a_count, default=value, help=f"default: {value}")
    said = parser.parse_args()
    for figure, amount in measure(said.transport, said.mib, said.ranks, said.engines).items():
        print(f"{figure:<50}{amount:>8.2f}")


if __name__ == "__main__":
    main()
