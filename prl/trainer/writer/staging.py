"""Host memory that a trainer rank copies its state into, and from which the process beside it writes.

It is allocated once, kept, and mapped by both. It has no name (memfd_create), so that nothing is left of it whoever is
killed, and the limit of /dev/shm does not hold for it: it counts as memory of the processes alone.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from prl.config.errors import UserError

ALIGNMENT = 512
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class StagingMemory:
    """One rank's, in either of its two processes: `fd` is what the other is given."""

    def __init__(self, fd: int | None = None) -> None:
        self.fd = _nameless_file() if fd is None else fd
        weakref.finalize(self, os.close, self.fd)
        self.size = 0
        self.pinned = 0  # bytes, from the beginning on
        self.memory: mmap.mmap | None = None

    def place(self, tensors: dict[K, Tensor]) -> dict[K, Slot]:
        """One behind the other, those of a GPU first, in memory that grows if it must: with the same tensors always at
        the same place.

        Raises UserError if there is not so much.
        """
        slots: dict[K, Slot] = {}
        end = from_device = 0
        for name in sorted(tensors, key=lambda name: not tensors[name].is_cuda):
            tensor = tensors[name]
            slots[name] = Slot(end, tensor.dtype, tuple(tensor.shape))
            end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
            from_device = end if tensor.is_cuda else from_device
        if end > self.size or from_device > self.pinned:
            self._pin(0)
            self._allocate(max(end, self.size))
            self._pin(from_device)
        return slots

    def _allocate(self, size: int) -> None:
        try:
            # a shortage is an error here, not a SIGBUS later
            os.posix_fallocate(self.fd, 0, size) if sys.platform == "linux" else os.truncate(self.fd, size)
        except OSError as error:
            raise UserError(
                f"{size} bytes of host memory for checkpoints are not to be had on this rank: {error.strerror}",
                where="ckpt.asynchronous",
                why="a save in the background needs a copy of all that the rank saves (with AdamW 12 bytes for each of "
                "its parameters), which is kept for the saves that follow",
                fix="ckpt.asynchronous=false, more memory, or more ranks",
            ) from error
        self.map(size)
        assert self.memory is not None
        # a page is mapped when it is first written to: now, rather than while training waits for a copy
        torch.frombuffer(self.memory, dtype=torch.uint8)[:: mmap.PAGESIZE].zero_()

    def _pin(self, size: int) -> None:
        """So many bytes; none: release those that are."""
        if self.memory is not None and (size or self.pinned):
            cudart, address = torch.cuda.cudart(), address_of(self.memory)
            code = int(cudart.cudaHostRegister(address, size, 0) if size else cudart.cudaHostUnregister(address))
            if code:
                raise RuntimeError(f"{size or self.pinned} bytes of host memory cannot be pinned: CUDA error {code}")
        self.pinned = size

    def map(self, size: int) -> None:
        """All `size` bytes that have been allocated."""
        if size != self.size:
            self.memory, self.size = mmap.mmap(self.fd, size), size

    def tensor(self, slot: Slot) -> Tensor:
        """What lies there, itself: with a storage of its own, so that DCP writes it without a copy."""
        if not math.prod(slot.shape):
            return torch.empty(slot.shape, dtype=slot.dtype)
        assert self.memory is not None
        flat = torch.frombuffer(self.memory, dtype=slot.dtype, count=math.prod(slot.shape), offset=slot.offset)
        return flat.view(slot.shape)

    @torch.no_grad()
    def fill(self, slots: dict[K, Slot], tensors: dict[K, Tensor]) -> None:
        """Copy; from a GPU all at once, and the host waits for the last one only."""
        for name, tensor in tensors.items():
            if tensor.numel():
                self.tensor(slots[name]).copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in tensors.values()):
            torch.cuda.current_stream().synchronize()


def _nameless_file() -> int:
    if sys.platform == "linux":
        return os.memfd_create("prl-checkpoint")
    with tempfile.TemporaryFile() as file:  # elsewhere on the disk, as far as its cache does not hold it
        return os.dup(file.fileno())


def address_of(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
