"""An engine process's side of `weights_nccl.py`."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from prl.transport.boxes import Boxes, Table, pack_boxes, unpack_boxes
from prl.transport.buckets import Chunk
from prl.transport.flat import DTYPES
from prl.transport.nccl_group import POLL_S, WATCH_S, Group, Party, connect, make_group, set_bytes
from prl.transport.rounds import SUM_BYTES, Message, Schedule
from prl.transport.staging import checksum
from prl.transport.weights_nccl import BUCKETS


@dataclass(frozen=True)
class Part:
    """A box of a tensor that has come: its first row and column there, and its data [rows, columns]."""

    name: str
    row: int
    column: int
    data: Tensor


class Wants(Protocol):
    """What of a checkpoint's tensors an engine process needs. The same object means the same as before."""

    def boxes(self, table: Table) -> Boxes:
        """Raises ValueError for a checkpoint that it does not know."""


@dataclass(frozen=True, eq=False)
class Round:
    """What comes in a round: M boxes of tensors in a bucket, one after another."""

    table: Table
    boxes: Boxes  # [M, 5]
    begin: NDArray[np.int64]  # where each begins, [M], bytes

    def part(self, index: int, bucket: Tensor) -> Part:
        """A view of the bucket, [n] uint8."""
        tensor, row, rows, column, columns = self.boxes[index].tolist()
        begin, dtype = int(self.begin[index]), DTYPES[self.table.dtypes[tensor]]
        data = bucket[begin : begin + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)
        return Part(self.table.names[tensor], row, column, data)

    def parts(self, bucket: Tensor) -> Iterator[Part]:
        return (self.part(index, bucket) for index in range(len(self.boxes)))


class Incoming:
    """What one engine process gets in each round, from all trainer ranks."""

    def __init__(self, schedule: Schedule, messages: list[Message], verify: bool) -> None:
        self.verify = verify
        trailer = SUM_BYTES if verify else 0
        sizes = np.stack([m.sizes + trailer * (m.sizes > 0) for m in messages], axis=1)  # [R, trainer ranks]
        begins = np.cumsum(sizes, axis=1) - sizes
        self.sizes: list[list[int]] = sizes.tolist()
        self.bytes = max(map(sum, self.sizes), default=0)
        number = np.concatenate([m.round for m in messages])
        order = np.argsort(number, kind="stable")
        ends = np.searchsorted(number[order], np.arange(len(self.sizes) + 1)).tolist()
        boxes = np.concatenate([m.boxes for m in messages])[order]
        begin = np.concatenate([begins[m.round, rank] + m.offset for rank, m in enumerate(messages)])[order]
        self.rounds = [Round(schedule.table, boxes[first:end], begin[first:end]) for first, end in pairwise(ends)]

    def check(self, number: int, got: Tensor, version: int) -> None:
        """Raises ValueError for damaged bytes."""
        found, told, begin = [], [], 0
        ranks = [rank for rank, size in enumerate(self.sizes[number]) if size]
        for size in self.sizes[number]:
            if size:
                end = begin + size - SUM_BYTES
                found.append(checksum(got[begin:end]))
                told.append(got[end : end + 8].view(torch.int64))
            begin += size
        if found and not torch.equal(torch.cat(found), torch.cat(told)):
            damaged = (torch.cat(found) != torch.cat(told)).nonzero().flatten().tolist()
            names = ", ".join(f"trainer/{ranks[i]}" for i in damaged)
            raise ValueError(f"round {number + 1} of version {version} is damaged: what came from {names}")


@dataclass
class Taking:
    """Of one publication: whether it is at its end, or was withdrawn, in which case the group is of no use any more."""

    done: threading.Event = field(default_factory=threading.Event)
    withdrawn: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def end(self) -> None:
        with self.lock:
            self.done.set()

    def withdraw(self, member: Membership) -> None:
        self.withdrawn.set()
        with self.lock:  # else the group may be that of the next
            if not self.done.is_set() and member.group is not None:
                member.group.drop()


@dataclass
class Membership:
    """Of this process, with one trainer."""

    store: dist.TCPStore
    identity: str
    name: str
    group: Group | None = None
    table: Table | None = None
    schedule: Schedule | None = None
    wants: Wants | None = None  # told last
    wanted: Boxes | None = None  # which boxes these are
    num_wants: int = 0
    party: Party | None = None  # of which `incoming` is
    incoming: Incoming | None = None
    last: Taking | None = None

    def told(self) -> Table:
        """What tensors there are: the same all through the trainer's life."""
        if self.table is None:
            self.table = Table.unpack(self.store.get("table"))
        return self.table

    def begin(self, update_info: dict[str, Any]) -> Taking:
        """To take a publication, behind all others."""
        if self.last is not None:
            self.last.end()
        self.last = Taking()
        threading.Thread(target=self.watch, args=(update_info, self.last), daemon=True).start()
        return self.last

    def watch(self, update_info: dict[str, Any], taking: Taking) -> None:
        """In a thread with a connection of its own, for the other may be waiting: leave a group that is given up."""
        store = None
        while not taking.done.wait(WATCH_S):
            store = store or connect(update_info["host"], update_info["port"], update_info["timeout_s"])
            if store.check([f"{update_info['publication']}/withdrawn"]):
                taking.withdraw(self)
                return

    def is_withdrawn(self, prefix: int, wait_s: float) -> bool:
        """Whether the trainer has given it up, or does so within wait_s."""
        deadline = time.monotonic() + wait_s
        while not self.store.check([f"{prefix}/withdrawn"]):
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_S)
        return True


_joined: dict[tuple[str, int], Membership] = {}  # of this process, by the trainer's address


def receive_nccl(update_info: dict[str, Any], device: torch.device) -> Iterator[Chunk]:
    """Whole named tensors as they arrive on `device`, a round's at a time.

    Raises as `receive_rounds` does.
    """
    unfinished: dict[str, tuple[Tensor, int]] = {}
    for arrived, bucket in receive_rounds(update_info, device):
        yield assemble(arrived.parts(bucket), arrived.table, unfinished)


def assemble(parts: Iterable[Part], table: Table, unfinished: dict[str, tuple[Tensor, int]]) -> Chunk:
    """The tensors that are whole now. Those that come whole are views of what has come.

    unfinished: tensors of which parts are still to come, as matrices, and of how many elements: kept from call to call.
    """
    whole: Chunk = []
    for part in parts:
        number = table.numbers[part.name]
        shape, rows, columns = table.shapes[number], int(table.rows[number]), int(table.columns[number])
        if part.data.numel() == rows * columns:
            whole.append((part.name, part.data.view(shape)))
            continue
        if part.name not in unfinished:
            unfinished[part.name] = part.data.new_empty(rows, columns), rows * columns
        matrix, left = unfinished.pop(part.name)
        height, width = part.data.shape
        matrix[part.row : part.row + height, part.column : part.column + width].copy_(part.data)
        if left > part.data.numel():
            unfinished[part.name] = matrix, left - part.data.numel()
        else:
            whole.append((part.name, matrix.view(shape)))
    return whole


def receive_rounds(
    update_info: dict[str, Any], device: torch.device, wants: Wants | None = None
) -> Iterator[tuple[Round, Tensor]]:
    """What this process wants (None: everything) as it arrives on `device`, each round with the bucket [n] uint8 that
    it is in until the next is asked for. As long as the same take part, these are the same `Round`s.

    Raises ValueError for damaged bytes, and torch's DistError when the trainer is silent for longer than its timeout.
    """
    version, prefix, joined = update_info["version"], update_info["publication"], _join(update_info, device)
    incoming = _enter(joined, update_info, device, wants)
    buckets = [torch.empty(incoming.bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS)]
    rounds = len(incoming.sizes)
    works = {0: _begin(joined, incoming, 0, buckets[0], update_info)}
    for number in range(rounds):
        if number + 1 < rounds:
            later = buckets[(number + 1) % BUCKETS]
            works[number + 1] = _begin(joined, incoming, number + 1, later, update_info)
        _finish(joined, works.pop(number), update_info)
        bucket = buckets[number % BUCKETS]
        if incoming.verify and joined.group is not None:
            try:
                incoming.check(number, bucket, version)
            except ValueError:
                if not joined.is_withdrawn(prefix, 0):
                    raise
        yield incoming.rounds[number], bucket
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    if joined.last is not None:
        joined.last.end()
    joined.store.set(f"{prefix}/received/{joined.identity}", "")


def _join(update_info: dict[str, Any], device: torch.device) -> Membership:
    """This process as a trainer knows it, from when it first hears of it."""
    where = update_info["host"], update_info["port"]
    if where not in _joined:
        name = f"process {os.getpid()} of {socket.gethostname()} on {device}"
        _joined[where] = Membership(connect(*where, update_info["timeout_s"]), uuid.uuid4().hex, name)
    return _joined[where]


def _schedule(joined: Membership, trainers: int, bucket_bytes: int) -> Schedule:
    """As the trainer works it out: the same all through its life."""
    if joined.schedule is None:
        table = joined.told()
        holdings = [unpack_boxes(joined.store.get(f"holds/{rank}"), table) for rank in range(trainers)]
        joined.schedule = Schedule.of(table, holdings, bucket_bytes)
    return joined.schedule


def _enter(joined: Membership, update_info: dict[str, Any], device: torch.device, wants: Wants | None) -> Incoming:
    """Say that this process is ready and what it wants, and join the others in the last group or a new one."""
    store, prefix, limit_s = joined.store, update_info["publication"], update_info["timeout_s"]
    if wants is not joined.wants:
        joined.wants, joined.wanted = wants, None
        if wants is not None:
            joined.num_wants += 1
            joined.wanted = wants.boxes(joined.told())
            set_bytes(store, f"wants/{joined.identity}/{joined.num_wants}", pack_boxes(joined.wanted))
    number = 0 if wants is None else joined.num_wants
    come = {"identity": joined.identity, "name": joined.name, "wants": number, "absent": update_info.get("absent", 0)}
    store.set(f"{prefix}/ready/{store.add(f'{prefix}/come', 1)}", json.dumps(come))
    party = Party.unpack(store.get(f"{prefix}/group"))
    if joined.group is not None and joined.group.number != party.number:
        joined.group.drop()
        joined.group = None
    if joined.incoming is None or (party != joined.party and party.number):
        joined.party = party
        schedule = _schedule(joined, party.trainers, update_info["bucket_bytes"])
        mine = party.members.index(joined.identity) if party.number else 0
        messages = [schedule.message(rank, mine, joined.wanted) for rank in range(party.trainers)]
        joined.incoming = Incoming(schedule, messages, update_info["checksums"])
    taking = joined.begin(update_info)
    try:
        if joined.group is None and party.number:
            rank = party.trainers + party.members.index(joined.identity)
            joined.group = make_group(store, party.number, rank, party.size, device, limit_s, taking.withdrawn)
    except RuntimeError:
        if not joined.is_withdrawn(prefix, limit_s):
            raise
    return joined.incoming


def _begin(joined: Membership, incoming: Incoming, number: int, bucket: Tensor, update_info: dict[str, Any]) -> Any:
    """Begin to take what is sent in a round; None once the trainer has given up."""
    sizes = incoming.sizes[number]
    others = 0 if joined.party is None else len(joined.party.members)
    try:
        if joined.group is None:
            return None
        nothing = torch.empty(0, dtype=torch.uint8, device=bucket.device)
        got = bucket[: sum(sizes)]
        return joined.group.exchange(got, sizes + [0] * others, nothing, [0] * (len(sizes) + others))
    except RuntimeError:
        _give_up(joined, update_info)
        return None


def _finish(joined: Membership, work: Any, update_info: dict[str, Any]) -> None:
    """Wait for a round; what its bucket holds stays as it is once the trainer has given up."""
    try:
        if work is not None:
            work.wait()
    except RuntimeError:
        _give_up(joined, update_info)


def _give_up(joined: Membership, update_info: dict[str, Any]) -> None:
    """After an error of torch's, which it raises again unless the trainer has withdrawn the update."""
    if not joined.is_withdrawn(update_info["publication"], update_info["timeout_s"]):
        raise
    joined.group = None
