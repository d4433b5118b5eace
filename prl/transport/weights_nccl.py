"""Weights from GPU to GPU: broadcast by NCCL from the first trainer rank, bucket by bucket, into every engine process.

Trainer and engines form a process group of their own, which engine processes join when they first hear of it. A
TCPStore on the trainer carries what is small: who has joined, who is ready, what a bucket holds. The group is NCCL's on
GPUs; on CPUs, where tests run, it is gloo's.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from prl.transport.buckets import Announce, Assembler, checksum, fill, in_dtype, parts_of

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


class NcclPublisher:
    """The trainer's side, rank 0 of the group. `publish` returns when every engine has every byte."""

    def __init__(
        self,
        address: str,
        num_receivers: int,
        device: torch.device,
        dtype: torch.dtype,
        *,
        timeout_s: float,
        bucket_bytes: int,
        verify: bool,
    ) -> None:
        """`num_receivers`: processes of all engines that hold weights; `dtype`: in which matrices travel."""
        self.address, self.num_receivers, self.device, self.dtype = address, num_receivers, device, dtype
        self.timeout_s, self.bucket_bytes, self.verify = timeout_s, bucket_bytes, verify
        self.store = dist.TCPStore(
            address, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
        )
        self.group: Group | None = None
        self.buckets = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS)]

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        """Raises TimeoutError that names the engines that did not come."""
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
        self._await("ready", version)
        if self.group is None:
            self.group = make_group(self.store, 0, 1 + self.num_receivers, self.device, self.timeout_s)
        works: list[Any] = [None] * BUCKETS
        number = 0
        for number, (parts, pieces) in enumerate(parts_of(in_dtype(tensors, self.dtype), self.bucket_bytes), 1):
            slot = number % BUCKETS
            bucket = self.buckets[slot]
            if works[slot] is not None:
                works[slot].wait()
            fill(bucket, parts, pieces)
            header = {"parts": parts, "checksum": checksum(bucket) if self.verify else None}
            self.store.set(f"bucket/{version}/{number}", json.dumps(header))
            works[slot] = self.group.broadcast(bucket)
        self.store.set(f"bucket/{version}/{number + 1}", json.dumps({"end": True}))
        for work in works:
            if work is not None:
                work.wait()
        self._await("received", version)
        for done in range(1, number + 2):
            self.store.delete_key(f"bucket/{version}/{done}")

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

    def acknowledge(self) -> None:
        """Nothing is kept."""


_joined: dict[tuple[str, int], Group] = {}  # of this process, by the trainer's address


def receive_nccl(update_info: dict[str, Any], device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Named tensors as they arrive on `device`; views that hold until the next bucket comes.

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
        yield from assembler.take(bucket, header["parts"])
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
