"""Weights from GPU to GPU: broadcast by NCCL from the first trainer rank, bucket by bucket, into every engine process.

Trainer and engines form a process group of their own. A TCPStore on the trainer carries what is small: who is ready,
who is in the group, what a bucket holds. Members of a group are fixed, so when others come than the last time, because
an engine died or one was started again, the group is dropped and another made. The group is NCCL's on GPUs; on CPUs,
where tests run, it is gloo's.

Keys of the store, all of one publication (a version may be published more than once):

    P/come       how many have come         P/ready/I    the I-th to come: who it is, how many are absent
    P/group      number and members         P/bucket/N   what the N-th bucket holds
    P/received/I who has everything          P/withdrawn  set when the trainer gave it up

An engine that dies in the middle leaves the others in a broadcast that never ends. The trainer is told so, withdraws
the publication and aborts the group, and so does each engine process that sees it withdrawn. They still go through all
that was to come, with whatever their buckets hold: a loader that has seen a part of a model is in no state to see
another. Nobody may sample from that, so the orchestrator keeps them paused until the next publication.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from prl.transport.buckets import Announce, Assembler, Chunk, Part, checksum, fill, parts_of, read_header
from prl.transport.stores import serve_store

BUCKETS = 2  # one travels while the other is filled
POLL_S = 0.005
WATCH_S = 0.2


@dataclass
class Group:
    """A process group between one trainer and those engine processes that took part when it was made."""

    number: int  # counts the groups of a trainer
    group: Any  # ProcessGroupNCCL or ProcessGroupGloo

    def broadcast(self, bucket: Tensor) -> Any:
        return self.group.broadcast([bucket])  # from rank 0, by default

    def drop(self) -> None:
        """Nothing is under way in it, and nobody is waited for: a member may be dead."""
        self.group.abort()


def make_group(store: dist.Store, number: int, rank: int, size: int, device: torch.device, timeout_s: float) -> Group:
    limit = timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore(f"group/{number}", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    else:
        group = dist.ProcessGroupGloo(prefixed, rank, size, limit)
    return Group(number, group)


@dataclass
class Bucket:
    """A bucket and when the GPU is done with what was last done to it (None: on a CPU, at once)."""

    data: Tensor
    event: torch.cuda.Event | None = None

    def mark(self) -> None:
        if self.data.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record()

    def await_last_use(self) -> None:
        """Make the current stream wait, not the caller."""
        if self.event is not None:
            self.event.wait()


class NcclPublisher:
    """The trainer's side, rank 0 of the group.

    `publish` fills buckets, and a thread with a stream of its own sends them. A version that fits into the buckets
    leaves the trainer free at once; of a larger one, filling waits for buckets that have been sent. What goes wrong in
    the thread is raised by the next `publish` or `acknowledge`: TimeoutError naming the engines that did not come.

    Who takes part is settled anew for each publication: the engines say how many are absent, for they are told by whom
    the engines are watched.
    """

    def __init__(
        self,
        address: str,
        num_receivers: int,
        device: torch.device,
        *,
        timeout_s: float,
        bucket_bytes: int,
        num_buckets: int,
        verify: bool,
        beat: Callable[[], None] = lambda: None,
    ) -> None:
        """`num_receivers`: processes of all engines that hold weights; `beat`: called while the trainer waits here."""
        self.beat = beat
        self.address, self.num_receivers, self.device = address, num_receivers, device
        self.timeout_s, self.bucket_bytes, self.verify = timeout_s, bucket_bytes, verify
        self.store = serve_store(address, timedelta(seconds=timeout_s))
        self.group: Group | None = None
        self.members: dict[str, str] = {}  # of the group: identity -> name
        self.groups = self.publications = 0  # so far
        self.withdrawn = threading.Event()
        self.free: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        self.num_left = max(BUCKETS, num_buckets)  # buckets that may still be made
        self.sender = ThreadPoolExecutor(1, "weights")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # of that thread
        self.sending: Future[None] | None = None
        self.spent: list[str] = []  # keys of the store, of the publication sent last

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        """Returns when every bucket is filled. The version before must have been sent, or this waits for it."""
        self._await_sent()
        self.publications += 1
        self.withdrawn.clear()
        told = announce(
            {
                "type": "nccl",
                "host": self.address,
                "port": self.store.port,
                "version": version,
                "publication": self.publications,
                "bucket_bytes": self.bucket_bytes,
                "timeout_s": self.timeout_s,
                "checksums": self.verify,
            }
        )
        filled: queue.SimpleQueue[tuple[list[Part], Bucket] | None] = queue.SimpleQueue()
        self.sending = self.sender.submit(self._send, version, told, filled)
        for parts, runs in parts_of(tensors, self.bucket_bytes):
            bucket = self._take_bucket()
            bucket.await_last_use()
            fill(bucket.data, runs)
            bucket.mark()
            filled.put((parts, bucket))
        filled.put(None)

    def _take_bucket(self) -> Bucket:
        """A free one, a new one, or the next that has been sent."""
        if self.free.empty() and self.num_left:
            self.num_left -= 1
            return Bucket(torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.device))
        while True:
            try:
                return self.free.get(timeout=POLL_S)
            except queue.Empty:
                self.beat()
                if self.sending is not None and self.sending.done():
                    self.sending.result()  # raises what ended it

    def withdraw(self) -> None:
        """Give up what was published last: no engine is there to take it, or one died when it should have.

        Engines that have begun to take it end up with nonsense.
        """
        self.withdrawn.set()
        self.store.set(self._key("withdrawn"), "")
        if self.group is not None:
            self.group.drop()

    def _send(
        self,
        version: int,
        told: threading.Event | None,
        filled: queue.SimpleQueue[tuple[list[Part], Bucket] | None],
    ) -> None:
        """In the thread: everything of one version, until every engine has it."""
        if told is not None:
            told.wait()
        members = self._gather(version)
        if self.stream is not None:
            torch.cuda.set_device(self.device)
            with torch.cuda.stream(self.stream):
                self._send_buckets(version, members, filled)
                self.stream.synchronize()
        else:
            self._send_buckets(version, members, filled)
        self._await_received(version, members)

    def _send_buckets(
        self,
        version: int,
        members: dict[str, str],
        filled: queue.SimpleQueue[tuple[list[Part], Bucket] | None],
    ) -> None:
        with self._unless_withdrawn(version, members):
            self._meet(members)
        number = 0
        while (item := filled.get()) is not None:
            number += 1
            parts, bucket = item
            bucket.await_last_use()
            header = {"parts": parts, "checksum": checksum(bucket.data) if self.verify else None}
            self._set(f"bucket/{number}", header)
            with self._unless_withdrawn(version, members):
                if self.group is not None and not self.withdrawn.is_set():
                    self.group.broadcast(bucket.data).wait()
            bucket.mark()
            self.free.put(bucket)
        self._set(f"bucket/{number + 1}", {"end": True})

    # --- who takes part -----------------------------------------------------------------------------------------------

    def _gather(self, version: int) -> dict[str, str]:
        """Identity -> name of all that take part, in the order in which they came. Not all of them if withdrawn."""
        deadline = time.monotonic() + self.timeout_s
        members: dict[str, str] = {}
        expected = self.num_receivers
        while len(members) < expected and not self.withdrawn.is_set():
            key = self._key(f"ready/{len(members) + 1}")
            if self.store.check([key]):
                come = json.loads(self.store.get(key))
                members[come["identity"]] = come["name"]
                expected = self.num_receivers - come["absent"]
                self.spent.append(key)
            elif time.monotonic() > deadline:
                missing = [name for identity, name in self.members.items() if identity not in members]
                self._raise_late("ready", version, missing, expected - len(members))
            else:
                time.sleep(POLL_S)
        self.spent.append(self._key("come"))
        return members

    def _meet(self, members: dict[str, str]) -> None:
        """In the present group if it consists of `members`, else in a new one; they learn which."""
        if self.withdrawn.is_set():
            self._set("group", {"number": 0, "members": []})
        elif self.group is not None and members.keys() == self.members.keys():
            self._set("group", {"number": self.group.number, "members": list(self.members)})
        else:
            self.groups += 1
            self._set("group", {"number": self.groups, "members": list(members)})
            if self.group is not None:
                self.group.drop()
                self.group = None
            self.group = make_group(self.store, self.groups, 0, 1 + len(members), self.device, self.timeout_s)
            self.members = members

    @contextlib.contextmanager
    def _unless_withdrawn(self, version: int, members: dict[str, str]) -> Iterator[None]:
        """What fails inside may do so because a member died: that is for others to find out, who withdraw it then."""
        try:
            yield
        except RuntimeError as error:
            if not self.withdrawn.wait(self.timeout_s):
                names = ", ".join(members.values())
                raise RuntimeError(
                    f"weights of version {version}: {error}; they were on their way to {names}"
                ) from error

    def _await_received(self, version: int, members: dict[str, str]) -> None:
        deadline = time.monotonic() + self.timeout_s
        waiting = {self._key(f"received/{identity}"): name for identity, name in members.items()}
        self.spent += waiting
        while waiting and not self.withdrawn.is_set():
            waiting = {key: name for key, name in waiting.items() if not self.store.check([key])}
            if waiting and time.monotonic() > deadline:
                self._raise_late("received", version, list(waiting.values()), len(waiting))
            time.sleep(POLL_S if waiting else 0)

    def _raise_late(self, what: str, version: int, names: list[str], count: int) -> NoReturn:
        unknown = count - len(names)
        if unknown > 0:
            names = [*names, f"{unknown} engine process{'es' if unknown > 1 else ''} that never joined"]
        raise TimeoutError(f"weights of version {version}: not {what} within {self.timeout_s:g} s: {', '.join(names)}")

    def _key(self, what: str) -> str:
        return f"{self.publications}/{what}"

    def _set(self, what: str, value: dict[str, Any]) -> None:
        key = self._key(what)
        self.spent.append(key)
        self.store.set(key, json.dumps(value))

    def _await_sent(self) -> None:
        if self.sending is not None:
            self.sending.result()
            self.sending = None
            if self.withdrawn.is_set():  # engines may still be reading
                self.group, self.members = None, {}
            else:
                for key in self.spent:
                    self.store.delete_key(key)
            self.spent = []

    def acknowledge(self) -> None:
        """Every engine serves the version, or it was withdrawn. Raises what went wrong in sending it."""
        self._await_sent()


@dataclass
class Membership:
    """Of this process, with one trainer."""

    store: dist.TCPStore
    identity: str
    name: str
    group: Group | None = None
    done: threading.Event = field(default_factory=threading.Event)  # with the last publication

    def watch(self, update_info: dict[str, Any]) -> None:
        """In a thread with a connection of its own, for the other may be waiting: leave a group that is given up."""
        done, group, store = self.done, self.group, None
        while not done.wait(WATCH_S):
            store = store or connect(update_info)
            if store.check([f"{update_info['publication']}/withdrawn"]):
                if group is not None:
                    group.drop()
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
    """Named tensors as they arrive on `device`, a bucket's at a time.

    Raises ValueError for damaged bytes, and torch's DistError when the trainer is silent for longer than its timeout.
    """
    version, bucket_bytes = update_info["version"], update_info["bucket_bytes"]
    prefix, joined = update_info["publication"], _join(update_info, device)
    _enter(joined, update_info, device)
    buckets = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS)]
    assembler, number = Assembler(), 1
    header = read_header(joined.store.get(f"{prefix}/bucket/{number}"), bucket_bytes)
    while "end" not in header:
        bucket = buckets[number % BUCKETS]
        _take(joined, update_info, bucket)
        sent = header["checksum"]
        if sent is not None and (found := checksum(bucket)) != sent and not joined.is_withdrawn(prefix, 0):
            raise ValueError(f"bucket {number} of version {version} is damaged: sum {found}, sent as {sent}")
        yield assembler.take(bucket, header["parts"])
        number += 1
        header = read_header(joined.store.get(f"{prefix}/bucket/{number}"), bucket_bytes)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    joined.done.set()
    joined.store.set(f"{prefix}/received/{joined.identity}", "")


def connect(update_info: dict[str, Any]) -> dist.TCPStore:
    limit = timedelta(seconds=update_info["timeout_s"])
    return dist.TCPStore(update_info["host"], update_info["port"], is_master=False, timeout=limit)


def _join(update_info: dict[str, Any], device: torch.device) -> Membership:
    """This process as a trainer knows it, from when it first hears of it."""
    where = update_info["host"], update_info["port"]
    if where not in _joined:
        name = f"process {os.getpid()} of {socket.gethostname()} on {device}"
        _joined[where] = Membership(connect(update_info), uuid.uuid4().hex, name)
    return _joined[where]


def _enter(joined: Membership, update_info: dict[str, Any], device: torch.device) -> None:
    """Say that this process is ready, and join the others in the last group or a new one."""
    store, prefix, limit_s = joined.store, update_info["publication"], update_info["timeout_s"]
    come = {"identity": joined.identity, "name": joined.name, "absent": update_info.get("absent", 0)}
    store.set(f"{prefix}/ready/{store.add(f'{prefix}/come', 1)}", json.dumps(come))
    found = json.loads(store.get(f"{prefix}/group"))
    number, members = found["number"], found["members"]
    if joined.group is None or joined.group.number != number:
        if joined.group is not None:
            joined.group.drop()
            joined.group = None
        try:
            if members:
                rank = 1 + members.index(joined.identity)
                joined.group = make_group(store, number, rank, 1 + len(members), device, limit_s)
        except RuntimeError:
            if not joined.is_withdrawn(prefix, limit_s):
                raise
    joined.done.set()
    joined.done = threading.Event()
    threading.Thread(target=joined.watch, args=(update_info,), daemon=True).start()


def _take(joined: Membership, update_info: dict[str, Any], bucket: Tensor) -> None:
    """Fill a bucket with what is sent; leave it as it is once the trainer has given up."""
    prefix = update_info["publication"]
    try:
        if joined.group is not None:
            joined.group.broadcast(bucket).wait()
    except RuntimeError:
        if not joined.is_withdrawn(prefix, update_info["timeout_s"]):
            raise
        joined.group = None
