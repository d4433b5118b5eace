"""`python -m prl.bench.publication_host [--help]`: a model through host memory, from several trainer ranks to engines.

All are processes on this host. Ranks hold rows of float32 matrices, as FSDP cuts them, which travel in bfloat16; each
engine fetches, checks and puts together the whole.
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from prl.bench.arguments import parser_of, refuse_beyond_memory, user_errors_told
from prl.bench.processes import Processes
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
    """`mib`: of the model, as it travels. Raises UserError when a process has died."""
    count = max(1, (mib << 20) // (ROWS * COLUMNS * 2))
    trainers, takers = range(ranks), range(ranks, ranks + engines)
    with tempfile.TemporaryDirectory() as directory, Processes("spawn") as processes:
        for rank in trainers:
            processes.start(f"trainer {rank}", train, kind, count, rank, ranks, directory)
        for number in range(engines):
            processes.start(f"engine {number}", serve)
        processes.tell(takers, processes.hear(0))
        taken, given = [processes.hear(index) for index in takers], [processes.hear(rank) for rank in trainers]
        processes.tell(trainers, None)
        for rank in trainers:
            processes.hear(rank)
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
    held = 2 + said.engines  # the ranks' float32, which is twice what travels, and each engine's copy
    refuse_beyond_memory(parser, f"--mib {said.mib} --engines {said.engines}", said.mib / 1024 * held)
    with user_errors_told():
        figures = measure(said.transport, said.mib, said.ranks, said.engines)
    for figure, amount in figures.items():
        print(f"{figure:<50}{amount:>8.2f}")


if __name__ == "__main__":
    main()
