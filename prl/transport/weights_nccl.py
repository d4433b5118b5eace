"""Weights from GPU to GPU: broadcast by NCCL from the first trainer rank, bucket by bucket, into every engine process.

Trainer and engines form a process group of their own, which engine processes join when they first hear of it. A
TCPStore on the trainer carries what is small: who has joined, who is ready, what a bucket holds. The group is NCCL's on
GPUs; on CPUs, where tests run, it is gloo's.
"""

from __future__ import annotations

import json
import os
import queue
import socket
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.transport.buckets import Announce, Assembler, Chunk, Part, checksum, fill, in_dtype, parts_of

BUCKETS = 2  # one travels while the other is filled
POLL_S = 0.005


@dataclass
class Group:
    """A process group between one trainer and the engines, and the store behind it."""

    store: dist.Store
    group: Any  # ProcessGroupNCCL or ProcessGroupGloo
    rank: int
    device: torch.device

    def broadcast(self, bucket: Tensor) -> Any:
        return self.group.broadcast([bucket])  # from rank 0, by default


def make_group(store: dist.Store, rank: int, size: int, device: torch.device, timeout_s: float) -> Group:
    limit = timedelta(seconds=timeout_s)
    prefixed = dist.PrefixStore("group", store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = limit
        group: Any = dist.ProcessGroupNCCL(prefixed, rank, size, options)
    else:
        group = dist.ProcessGroupGloo(prefixed, rank, size, limit)
    return Group(store, group, rank, device)


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
    """

    def __init__(
        self,
        address: str,
        num_receivers: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        timeout_s: float,
        bucket_bytes: int,
        num_buckets: int,
        verify: bool,
    ) -> None:
        """`num_receivers`: processes of all engines that hold weights; `dtype`: in which matrices travel."""
        self.address, self.num_receivers, self.device, self.dtype = address, num_receivers, device, dtype
        self.timeout_s, self.bucket_bytes, self.verify = timeout_s, bucket_bytes, verify
        self.store = dist.TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.group: Group | None = None
        self.free: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        self.num_left = max(BUCKETS, num_buckets)  # buckets that may still be made
        self.sender = ThreadPoolExecutor(1, "weights")
        self.sending: Future[None] | None = None
        self.sent_headers: list[str] = []  # keys of the store, of the version sent last

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        """Returns when every bucket is filled. The version before must have been sent, or this waits for it."""
        self._await_sent()
        announce(
            {
                "type": "nccl",
                "host": self.address,
                "port": self.store.port,
                "version": version,
                "num_receivers": self.num_receivers,
                "bucket_bytes": self.bucket_bytes,
                "timeout_s": self.timeout_s,
                "checksums": self.verify,
            }
        )
        filled: queue.SimpleQueue[tuple[list[Part], Bucket] | None] = queue.SimpleQueue()
        self.sending = self.sender.submit(self._send, version, filled)
        for parts, pieces in parts_of(in_dtype(tensors, self.dtype), self.bucket_bytes):
            bucket = self._take_bucket()
            bucket.await_last_use()
            fill(bucket.data, parts, pieces)
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
                if self.sending is not None and self.sending.done():
                    self.sending.result()  # raises what ended it

    def _send(self, version: int, filled: queue.SimpleQueue[tuple[list[Part], Bucket] | None]) -> None:
        """In the thread: everything of one version, until every engine has it."""
        self._await("ready", version)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device)
            with torch.cuda.stream(stream):
                self._send_buckets(version, filled)
                stream.synchronize()
        else:
            self._send_buckets(version, filled)
        self._await("received", version)

    def _send_buckets(self, version: int, filled: queue.SimpleQueue[tuple[list[Part], Bucket] | None]) -> None:
        if self.group is None:
            self.group = make_group(self.store, 0, 1 + self.num_receivers, self.device, self.timeout_s)
        number = 0
        while (item := filled.get()) is not None:
            number += 1
            parts, bucket = item
            bucket.await_last_use()
            header = {"parts": parts, "checksum": checksum(bucket.data) if self.verify else None}
            self.store.set(f"bucket/{version}/{number}", json.dumps(header))
            self.group.broadcast(bucket.data).wait()
            bucket.mark()
            self.free.put(bucket)
        self.store.set(f"bucket/{version}/{number + 1}", json.dumps({"end": True}))
        self.sent_headers = [f"bucket/{version}/{done}" for done in range(1, number + 2)]

    def _await(self, what: str, version: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        waiting = set(range(1, self.num_receivers + 1))
        while waiting:
            waiting = {rank for rank in waiting if not self.store.check([f"{what}/{version}/{rank}"])}
            if waiting and time.monotonic() > deadline:
                names = ", ".join(self._name(rank) for rank in sorted(waiting))
                raise TimeoutError(f"weights of version {version}: not {what} within {self.timeout_s:g} s: {names}")
            time.sleep(POLL_S if waiting else 0)

    def _name(self, rank: int) -> str:
        key = f"name/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else f"engine process {rank}, which never joined"

    def _await_sent(self) -> None:
        if self.sending is not None:
            self.sending.result()
            self.sending = None
            for key in self.sent_headers:
                self.store.delete_key(key)

    def acknowledge(self) -> None:
        """Every engine serves the version. Raises what went wrong in sending it."""
        self._await_sent()


_joined: dict[tuple[str, int], Group] = {}  # of this process, by the trainer's address


def receive_nccl(update_info: dict[str, Any], device: torch.device) -> Iterator[Chunk]:
    """Named tensors as they arrive on `device`, a bucket's at a time.

    Raises ValueError for damaged bytes, and torch's DistError when the trainer is silent for longer than its timeout.
    """
    version, bucket_bytes = update_info["version"], update_info["bucket_bytes"]
    group = _join(update_info, device)
    group.store.set(f"ready/{version}/{group.rank}", "")
    if group.group is None:
        limit_s, size = update_info["timeout_s"], 1 + update_info["num_receivers"]
        group.group = make_group(group.store, group.rank, size, device, limit_s).group
    buckets = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS)]
    assembler, number = Assembler(), 1
    header = json.loads(group.store.get(f"bucket/{version}/{number}"))
    while "end" not in header:
        bucket = buckets[number % BUCKETS]
        group.broadcast(bucket).wait()
        if header["checksum"] is not None and (found := checksum(bucket)) != header["checksum"]:
            sent = header["checksum"]
            raise ValueError(f"bucket {number} of version {version} is damaged: sum {found}, sent as {sent}")
        yield assembler.take(bucket, header["parts"])
        number += 1
        header = json.loads(group.store.get(f"bucket/{version}/{number}"))
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    group.store.set(f"received/{version}/{group.rank}", "")


def _join(update_info: dict[str, Any], device: torch.device) -> Group:
    """This process's place in the group of a trainer; taken when it first hears of it."""
    where = update_info["host"], update_info["port"]
    if where not in _joined:
        store = dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=update_info["timeout_s"]))
        rank = store.add("members", 1)
        store.set(f"name/{rank}", f"process {os.getpid()} of {socket.gethostname()} on {device}")
        _joined[where] = Group(store, None, rank, device)
    return _joined[where]
