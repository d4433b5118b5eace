"""The sides of `publication.py`, each a process: a trainer rank with its shards, an engine process with its own.

Weights follow from tensor, row, column and version, so that whoever has some can tell whether they are right.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from prl.bench.publication import EXPERTS, Load
from prl.config.schema import RunConfig
from prl.inference.vllm.copies import Copies, Copy
from prl.models.layers.decoder import Decoder
from prl.planning.run_plan import MeshPlan
from prl.trainer.owned import OwnShards
from prl.trainer.parallelize import apply_expert_parallelism, apply_fsdp
from prl.trainer.world import build_world
from prl.transport.boxes import COLUMN, COLUMNS, ROW, ROWS, TENSOR, Boxes, Table
from prl.transport.flat import DTYPES
from prl.transport.nccl_group import Group, connect
from prl.transport.receiving_nccl import receive_rounds
from prl.transport.stores import serve_store
from prl.transport.weights_nccl import NcclPublisher

TIMEOUT_S = 600.0
SAMPLE_S = 0.2
CPU = torch.device("cpu")
WIRE = torch.bfloat16


# --- what is measured -------------------------------------------------------------------------------------------------


class Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip


mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Mallinfo


def allocated() -> int:
    """Bytes that this process has from malloc now: tensors, arrays, gloo's buffers; Python's small objects are not."""
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


class Peak:
    """The most that is allocated while it runs."""

    def __init__(self) -> None:
        self.bytes, self.done = allocated(), threading.Event()
        self.thread = threading.Thread(target=self._follow, daemon=True)

    def _follow(self) -> None:
        while not self.done.wait(SAMPLE_S):
            self.bytes = max(self.bytes, allocated())

    def __enter__(self) -> Peak:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.thread.join()


class Traffic:
    """Bytes that this process gives to and gets from others, as its group is told to move them."""

    def __init__(self) -> None:
        self.sent = self.got = 0
        self.began = 0.0  # with the first round

    @contextmanager
    def counted(self, peak: Peak) -> Iterator[Traffic]:
        """`peak` begins with the first round, when all plans are made."""
        exchange = Group.exchange

        def counting(group: Group, got: Tensor, got_sizes: list[int], given: Tensor, given_sizes: list[int]) -> Any:
            if not self.began:
                self.began, peak.bytes = time.perf_counter(), allocated()
            self.sent, self.got = self.sent + given.numel(), self.got + got.numel()
            return exchange(group, got, got_sizes, given, given_sizes)

        Group.exchange = counting  # type: ignore[method-assign, assignment]
        try:
            yield self
        finally:
            Group.exchange = exchange  # type: ignore[method-assign]


# --- the numbers ------------------------------------------------------------------------------------------------------


PERIOD = 65521


class Values:
    """What the elements of a box are in each version: [rows, columns] of a dtype; in float32, as the trainer has them,
    few are exact in bfloat16.
    """

    def __init__(self, table: Table, device: torch.device = CPU) -> None:
        count = PERIOD + int(table.columns.max())
        self.every = torch.arange(count, device=device).remainder_(PERIOD).float().mul_(1e-3)  # a row is a part of it

    def of(self, box: list[int], version: int, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor, row, rows, column, columns = box
        begins = torch.arange(row, row + rows, device=self.every.device).mul_(1009)
        begins.add_(tensor * 31 + version * 101 + column).remainder_(PERIOD)
        return self.every.as_strided((PERIOD, columns), (1, 1))[begins].to(dtype)


# --- trainer ----------------------------------------------------------------------------------------------------------


def holdings_of(table: Table, load: Load) -> list[Boxes]:
    """What FSDP and expert parallelism give to each rank: rows of each expert that its expert rank has (gate and up are
    one matrix), rows of all else.
    """
    held: list[list[list[int]]] = [[] for _ in range(load.trainers)]
    for number, (name, rows, columns) in enumerate(zip(table.names, table.rows, table.columns, strict=True)):
        ranks, before, total = range(load.trainers), 0, int(rows)
        if (found := re.search(r"\.experts\.(\d+)\.(\w+)", name)) is not None:
            ranks = range(int(found[1]) // (EXPERTS // load.ep), load.trainers, load.ep)
            if found[2] != "down_proj":
                before, total = (0 if found[2] == "gate_proj" else int(rows)), 2 * int(rows)
            assert total % len(ranks) == 0, "experts are cut along another dimension"
        step = -(-total // len(ranks))
        for i, rank in enumerate(ranks):
            first, end = max(i * step - before, 0), min((i + 1) * step - before, int(rows))
            if first < end:
                held[rank].append([number, first, end - first, 0, int(columns)])
    return [np.array(boxes, dtype=np.int64) for boxes in held]


def check_holdings(load: Load, rank: int, model: Decoder, config: RunConfig, expected: Boxes, pipe: Connection) -> None:
    """Whether the trainer's own code comes to the same, over a process group that is none."""
    dist.init_process_group("fake", rank=rank, world_size=load.trainers, store=FakeStore())
    world = build_world(MeshPlan(dp_replicate=1, dp_shard=load.trainers, cp=1, ep=load.ep), CPU)
    apply_expert_parallelism(model, config.parallelism, world)
    apply_fsdp(model, config, world)
    pipe.send(np.array_equal(OwnShards(model, WIRE, world).boxes, expected))


def train(load: Load, rank: int, table: Table, boxes: Boxes, pipe: Connection) -> None:
    """Publish all versions. Pipe: the store's port, updates, figures."""
    if rank == 0:
        store = serve_store("127.0.0.1", timedelta(seconds=TIMEOUT_S))
        pipe.send(store.port)
        pipe.recv()
    else:
        store = connect("127.0.0.1", pipe.recv(), TIMEOUT_S)
    publisher = NcclPublisher(
        store, rank, load.trainers, load.engines * load.tp, CPU,
        timeout_s=TIMEOUT_S, bucket_bytes=load.bucket_bytes, num_buckets=2, verify=True,
    )  # fmt: skip
    computing = time.thread_time()
    publisher.hold(table, boxes)
    figures = {"plan": time.thread_time() - computing, "rounds": publisher.schedule.rounds}
    figures["laps"] = publisher.schedule.laps
    values, parts = Values(table), [torch.empty(rows, columns) for _, _, rows, _, columns in boxes.tolist()]
    for version in range(1, load.versions + 1):
        for part, box in zip(parts, boxes.tolist(), strict=True):
            part.copy_(values.of(box, version))
        pipe.send(None)  # filled
        pipe.recv()
        began, traffic = time.perf_counter(), Traffic()
        with Peak() as peak, traffic.counted(peak):
            publisher.publish(version, parts, pipe.send)
            publisher.acknowledge()
        figures |= {"meeting": traffic.began - began, "seconds": time.perf_counter() - traffic.began}
        figures["sent"] = traffic.sent
    publisher.given.clear()
    while not publisher.free.empty():
        publisher.free.get()
    pipe.send(figures | {"held": peak.bytes - allocated()})
    pipe.recv()  # the store lives as long as somebody needs it


# --- engine -----------------------------------------------------------------------------------------------------------


def tensor_parallel(table: Table, rank: int, ways: int, kv_heads: int) -> Boxes:
    """What an engine process of that rank copies of each tensor, cut as vLLM cuts Qwen3's: vocabulary, queries, gate
    and up by rows, what follows them by columns, keys and values by heads, which several share where these are few.
    """
    boxes = table.whole()
    for box, name in zip(boxes, table.names, strict=True):
        part, of, dim = rank, ways, ROW
        if any(key in name for key in ("q_proj.", "gate_proj.", "up_proj.", "embed_tokens.", "lm_head.")):
            pass
        elif "k_proj." in name or "v_proj." in name:
            part, of = rank * min(kv_heads, ways) // ways, min(kv_heads, ways)
        elif "o_proj." in name or "down_proj." in name:
            dim = COLUMN
        else:
            continue
        step = -(-box[dim + 1] // of)
        box[dim] = min(step * part, box[dim + 1])
        box[dim + 1] = min(step, box[dim + 1] - box[dim])
    return boxes[(boxes[:, ROWS] > 0) & (boxes[:, COLUMNS] > 0)]


def room_for(table: Table, boxes: Boxes) -> tuple[Copies, list[Tensor]]:
    """The engine's parameters, one for each box, and how they are filled: as vLLM's loaders were seen to do it."""
    copies, targets = Copies({name: [] for name in table.names}), []
    for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True):
        copies.form[name] = torch.Size(shape), DTYPES[dtype]
    for number, row, rows, column, columns in boxes.tolist():
        target = torch.zeros(rows, columns, dtype=DTYPES[table.dtypes[number]])
        width = int(table.columns[number])
        copies.of[table.names[number]].append(Copy(target, (rows, columns), (width, 1), row * width + column))
        targets.append(target)
    return copies, targets


def serve(load: Load, table: Table, boxes: Boxes, pipe: Connection) -> None:
    """Take all versions of these boxes into place, and look whether they are right. Pipe: updates, figures."""
    copies, targets = room_for(table, boxes)
    while True:
        info, traffic = pipe.recv(), Traffic()
        with Peak() as peak, traffic.counted(peak):
            copies.repeat_rounds(receive_rounds(info, CPU, copies))
        held = peak.bytes - allocated()  # the plan stays
        if info["version"] == load.versions:  # nothing of the versions before is left then
            values = Values(table)
            for target, box in zip(targets, boxes.tolist(), strict=True):
                right = same_bytes(target, values.of(box, load.versions, target.dtype))
                assert right, f"{table.names[box[TENSOR]]} is wrong"
        pipe.send({"held": held, "got": traffic.got})


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))
