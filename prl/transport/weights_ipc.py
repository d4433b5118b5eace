"""Weights between processes that share a GPU: two buckets of the trainer's memory, which the engine maps (CUDA IPC).

Each trainer rank serves the engine process on its own GPU; whole tensors exist on every rank anyway while a sharded
model is gathered. A TCPStore of the first rank carries handles, what a bucket holds, and who is done with which. Flat
buckets, because a handle for each tensor costs seconds for a large model.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from prl.transport.buckets import Announce, Assembler, Chunk, checksum, fill, parts_of, read_header
from prl.transport.weights_nccl import BUCKETS

# what of a shared bucket one process tells another: arguments of rebuild_cuda_tensor, by its names for them
NUMBERS = ("storage_size_bytes", "storage_offset_bytes", "ref_counter_offset")
HANDLES = ("storage_handle", "ref_counter_handle", "event_handle")  # opaque bytes
MAX_HANDLE = 1024  # bytes
HEX = re.compile("([0-9a-f]{2})*")


def gpu_name(device: torch.device) -> str:
    """The same for all processes on a GPU, however they number it."""
    return str(torch.cuda.get_device_properties(device).uuid)


@contextlib.contextmanager
def plain_segments() -> Iterator[None]:
    """Memory that any process may map by a handle. Expandable segments are shared by file descriptors, which takes the
    right to trace the other process: containers and many hosts do not grant it.
    """
    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    if "expandable_segments:True" not in settings:
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")  # has no public name in torch 2.11 to 2.13
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings(settings)


class IpcPublisher:
    """One trainer rank's side. `publish` returns when the engine on its GPU has every byte."""

    def __init__(
        self,
        store: dist.Store,
        announcing: dict[str, Any] | None,
        device: torch.device,
        *,
        serves: bool,
        timeout_s: float,
        bucket_bytes: int,
        verify: bool,
    ) -> None:
        """`announcing`: host and port of the store, for the rank that speaks for all; `serves`: an engine is here."""
        self.store, self.announcing, self.device = store, announcing, device
        self.serves, self.timeout_s, self.verify = serves, timeout_s, verify
        self.name = gpu_name(device)
        self.bucket_bytes = bucket_bytes
        self.buckets: list[Tensor] = []
        if serves:
            with plain_segments():
                self.buckets = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(BUCKETS)]
            handles = [handle_of(reduce_tensor(bucket)[1]) for bucket in self.buckets]
            store.set(f"handles/{self.name}", json.dumps(handles))

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        """Raises TimeoutError that names the GPU whose engine takes too long."""
        if self.announcing is not None:
            announce({"type": "ipc", "version": version, "timeout_s": self.timeout_s, **self.announcing})
        if not self.serves:  # take part in the gathers
            for _ in tensors:
                pass
            return
        prefix, number = f"{self.name}/{version}", 0
        for number, (parts, runs) in enumerate(parts_of(tensors, self.bucket_bytes), 1):
            if number > BUCKETS:
                self._await(f"{prefix}/free/{number - BUCKETS}", version)
            bucket = self.buckets[number % BUCKETS]
            fill(bucket, runs)
            header = {"parts": parts, "checksum": checksum(bucket) if self.verify else None}
            torch.cuda.current_stream(self.device).synchronize()  # the other process sees memory, not streams
            self.store.set(f"{prefix}/bucket/{number}", json.dumps(header))
        self.store.set(f"{prefix}/bucket/{number + 1}", json.dumps({"end": True}))
        self._await(f"{prefix}/received", version)
        for done in range(1, number + 2):
            self.store.delete_key(f"{prefix}/bucket/{done}")
            self.store.delete_key(f"{prefix}/free/{done}")

    def _await(self, key: str, version: int) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not self.store.check([key]):
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"weights of version {version}: the engine on GPU {self.name} did not take them within "
                    f"{self.timeout_s:g} s"
                )
            time.sleep(0.0005)

    def acknowledge(self) -> None:
        """Nothing is kept."""


_mapped: dict[tuple[str, int], tuple[dist.Store, list[Tensor]]] = {}  # of this process, by the trainer's address


def receive_ipc(update_info: dict[str, Any], device: torch.device) -> Iterator[Chunk]:
    """Named tensors in the trainer's memory, a bucket's at a time.

    Raises ValueError for damaged bytes, and torch's DistError when the trainer is silent for longer than its timeout.
    """
    store, buckets = _map(update_info, device)
    prefix = f"{gpu_name(device)}/{update_info['version']}"
    assembler, number = Assembler(), 1
    header = read_header(store.get(f"{prefix}/bucket/{number}"), buckets[0].numel())
    while "end" not in header:
        bucket = buckets[number % BUCKETS]
        if header["checksum"] is not None and (found := checksum(bucket)) != header["checksum"]:
            raise ValueError(f"bucket {number} is damaged: sum {found}, sent as {header['checksum']}")
        yield assembler.take(bucket, header["parts"])
        torch.cuda.synchronize(device)
        store.set(f"{prefix}/free/{number}", "")
        number += 1
        header = read_header(store.get(f"{prefix}/bucket/{number}"), buckets[0].numel())
    store.set(f"{prefix}/received", "")


def _map(update_info: dict[str, Any], device: torch.device) -> tuple[dist.Store, list[Tensor]]:
    where = update_info["host"], update_info["port"]
    if where not in _mapped:
        store = dist.TCPStore(*where, is_master=False, timeout=timedelta(seconds=update_info["timeout_s"]))
        handles = read_handles(store.get(f"handles/{gpu_name(device)}"))
        index = device.index if device.index is not None else torch.cuda.current_device()
        buckets = [rebuild_cuda_tensor(**arguments_of(handle, index)) for handle in handles]
        _mapped[where] = store, buckets
    return _mapped[where]


def handle_of(arguments: tuple[Any, ...]) -> dict[str, Any]:
    """What another process needs of `reduce_tensor`'s arguments for a flat tensor of bytes, as JSON has it."""
    named = dict(zip(signature(rebuild_cuda_tensor).parameters, arguments, strict=True))
    return {
        **{name: named[name] for name in (*NUMBERS, "event_sync_required")},
        **{name: named[name].hex() for name in HANDLES},
    }


def read_handles(text: bytes) -> list[dict[str, Any]]:
    """Two buckets' handles. Raises ValueError for what is none: numbers and bytes, no objects."""
    try:
        handles = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the handles of the trainer's buckets are not JSON: {error}") from error
    if not isinstance(handles, list) or len(handles) != BUCKETS or not all(map(is_handle, handles)):
        raise ValueError("the trainer's handles are none of buckets")
    return handles


def is_handle(handle: object) -> bool:
    if not isinstance(handle, dict) or handle.keys() != {*NUMBERS, *HANDLES, "event_sync_required"}:
        return False
    numbers, texts = [handle[name] for name in NUMBERS], [handle[name] for name in HANDLES]
    return (
        all(type(number) is int and 0 <= number < 1 << 48 for number in numbers)
        and all(isinstance(text, str) and HEX.fullmatch(text) and len(text) <= 2 * MAX_HANDLE for text in texts)
        and type(handle["event_sync_required"]) is bool
    )


def arguments_of(handle: dict[str, Any], index: int) -> dict[str, Any]:
    """Of `rebuild_cuda_tensor`, for a flat tensor of bytes on the GPU that this process counts as `index`."""
    return {
        "tensor_cls": Tensor,
        "tensor_size": (handle["storage_size_bytes"],),
        "tensor_stride": (1,),
        "tensor_offset": 0,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": torch.uint8,
        "storage_device": index,
        "requires_grad": False,
        **{name: handle[name] for name in (*NUMBERS, "event_sync_required")},
        **{name: bytes.fromhex(handle[name]) for name in HANDLES},
    }
