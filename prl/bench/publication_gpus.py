"""`python -m prl.bench.publication_gpus [--help]`: a model's weights from a trainer's GPU to an engine's, in seconds.

One trainer rank holds the model in float32, one engine process has room for it in bfloat16, stacked experts included,
or for its part of it under tensor parallelism (--tp). What is in between is what runs use, over NCCL (on CPUs, gloo).
Before the last version everything was something else; the engine looks at every number of that.
"""

from __future__ import annotations

import re
import statistics
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from prl.bench.arguments import parser_of, user_errors_told
from prl.bench.processes import Processes
from prl.config.arguments import a_count
from prl.config.errors import UserError

TIMEOUT_S = 300.0
BUCKET_MIB = 256  # as `weight_transport.bucket_mib`
EXPERT = re.compile(r"(.*\.experts)\.\d+\.(?:gate|up|(down))_proj")


def train(overrides: list[str], versions: int, device: torch.device, pipe: Connection, _: Connection) -> None:
    """Publish all versions. Pipe: updates to the engine; whether it has come to an end."""
    from prl.bench.publication_sides import WIRE, Values
    from prl.config import compose
    from prl.trainer.owned import OwnShards
    from prl.trainer.parallelize import build_meta
    from prl.transport.stores import serve_store
    from prl.transport.weights_nccl import NcclPublisher

    model = build_meta(compose(overrides), None).to_empty(device=device)
    world: Any = SimpleNamespace(is_main=True, rank=0, size=1, device=device)
    owned = OwnShards(model, WIRE, world)
    publisher = NcclPublisher(
        serve_store("127.0.0.1", timedelta(seconds=TIMEOUT_S)), 0, 1, 1, device,
        timeout_s=TIMEOUT_S, bucket_bytes=BUCKET_MIB << 20, num_buckets=2, verify=True,
    )  # fmt: skip
    publisher.hold(owned.table, owned.boxes)
    values = Values(owned.table, device)
    for version in range(1, versions + 1):
        if version in (1, versions):
            for part, box in zip(owned.parts(), owned.boxes.tolist(), strict=True):
                part.copy_(values.of(box, version).view(part.shape))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        pipe.recv()
        publisher.publish(version, owned.parts(), pipe.send)
        publisher.acknowledge()
    pipe.recv()


def serve(table: Any, boxes: Any, versions: int, device: torch.device, pipe: Connection, results: Connection) -> None:
    """Take all versions into place. Results: seconds of each, bytes; or what is wrong."""
    from prl.bench.publication_sides import Values, same_bytes
    from prl.transport.receiving_nccl import receive_rounds

    if device.type == "cuda":
        torch.cuda.set_device(device)
    copies, targets = room_for(table, boxes, device)
    seconds = []
    for _ in range(versions):
        pipe.send("ready")
        info = pipe.recv()
        began = time.perf_counter()
        copies.repeat_rounds(receive_rounds(info, device, copies))
        seconds.append(time.perf_counter() - began)
    values = Values(table, device)
    for target, box in zip(targets, boxes.tolist(), strict=True):
        if not same_bytes(target, values.of(box, versions, target.dtype)):
            results.send(f"{table.names[box[0]]} is wrong")
            return
    results.send((seconds, sum(target.nbytes for target in targets)))
    pipe.send("done")


def room_for(table: Any, boxes: Any, device: torch.device) -> tuple[Any, list[Tensor]]:
    """The engine's parameters, and how they are filled: experts of a layer in two, as vLLM stacks them."""
    from prl.inference.vllm.copies import Copies, Copy
    from prl.transport.flat import DTYPES

    copies = Copies({name: [] for name in table.names})
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        copies.form[name] = torch.Size(shape), DTYPES[dtype]
    names = [table.names[number] for number in boxes[:, 0].tolist()]
    stacks = [found.groups() if (found := EXPERT.match(name)) else (name,) for name in names]
    room: dict[tuple[Any, ...], int] = {}
    for stack, (_, _, rows, _, columns) in zip(stacks, boxes.tolist(), strict=True):
        room[stack] = room.get(stack, 0) + rows * columns
    memories: dict[tuple[Any, ...], Tensor] = {}
    targets = []
    for name, stack, (number, row, rows, column, columns) in zip(names, stacks, boxes.tolist(), strict=True):
        if stack not in memories:
            memories[stack] = torch.zeros(room[stack], dtype=copies.form[name][1], device=device)
        memory = memories[stack]
        room[stack] -= rows * columns
        begin = len(memory) - room[stack] - rows * columns
        targets.append(memory[begin : begin + rows * columns].view(rows, columns))
        width = int(table.columns[number])
        copies.of[name].append(Copy(targets[-1], (rows, columns), (width, 1), row * width + column))
    return copies, targets


def measure(overrides: list[str], versions: int, ways: int, devices: list[torch.device]) -> dict[str, float]:
    """Raises RuntimeError when the weights are wrong, UserError when a process has died."""
    from prl.bench.publication_sides import WIRE, tensor_parallel
    from prl.config import compose
    from prl.trainer.owned import OwnShards
    from prl.trainer.parallelize import build_meta

    config = compose(overrides)
    model, world = build_meta(config, None), SimpleNamespace(is_main=True, rank=0, size=1)
    table = OwnShards(model, WIRE, world).table  # type: ignore[arg-type]
    boxes = tensor_parallel(table, 0, ways, config.model.card.num_key_value_heads)
    with Processes("spawn") as processes:
        ours, theirs = processes.context.Pipe()
        processes.start("the trainer's side", train, overrides, versions, devices[0], ours)
        engine = processes.start("the engine's side", serve, table, boxes, versions, devices[1], theirs)
        told = processes.hear(engine)
    if isinstance(told, str):
        raise RuntimeError(told)
    seconds, nbytes = told
    return {
        "GB in the engine": nbytes / 1e9,
        "seconds of the first version": seconds[0],
        "seconds, median of the others": statistics.median(seconds[1:]),
        "seconds, least": min(seconds[1:]),
        "seconds, most": max(seconds[1:]),
    }


def devices_of(kind: str) -> list[torch.device]:
    """The trainer's and the engine's. Raises UserError without two GPUs."""
    if kind == "cpu":
        return [torch.device("cpu")] * 2
    if (count := torch.cuda.device_count()) < 2:
        raise UserError(
            "Weights go from one GPU to another.",
            where="--device cuda",
            why=f"torch sees {count} here",
            fix="a host with two GPUs; --device cpu takes the same way over gloo",
        )
    return [torch.device("cuda", 0), torch.device("cuda", 1)]


def main() -> None:
    parser = parser_of("publication_gpus", __doc__)
    parser.add_argument("--model", default="qwen3_30b_a3b", help="of conf/model; default: qwen3_30b_a3b")
    parser.add_argument("--layers", type=a_count, help="of it; default: all")
    parser.add_argument("--tp", type=a_count, default=1, help="ways of tensor parallelism in the engine; default: 1")
    parser.add_argument("--versions", type=a_count, default=6, help="the first makes the plan; default: 6")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: cuda")
    said = parser.parse_args()
    if said.versions < 2:
        parser.error("--versions: 2 or more, for the first is not like the others")
    layers = [] if said.layers is None else [f"model.card.num_hidden_layers={said.layers}"]
    with user_errors_told():
        overrides = [f"model={said.model}", *layers]
        figures = measure(overrides, said.versions, said.tp, devices_of(said.device))
    print("\n".join(f"{name:<32}{value:>10.3f}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
