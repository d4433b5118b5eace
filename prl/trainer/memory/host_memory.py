"""Host memory that a GPU copies to and from beside its computation: pinned slabs, and a stream for the copies.

On CPU devices the same classes copy at once, so that everything built on them runs, and is tested, there as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

SLAB_BYTES = 256 << 20
ALIGNMENT = 512


class CopyStream:
    """Copies that run beside the compute stream, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def catch_up(self) -> None:
        """Copies asked for from now on wait for all that the compute stream has been given until now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def follow(self, other: CopyStream) -> None:
        """Copies asked for from now on wait for those of another stream."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def copy(self, target: Tensor, source: Tensor) -> None:
        if self.stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> torch.cuda.Event | None:
        """Stands for the end of all copies asked for until now."""
        return None if self.stream is None else self.stream.record_event()

    def synchronize(self) -> None:
        """The host waits for all copies."""
        if self.stream is not None:
            self.stream.synchronize()


def compute_waits(event: torch.cuda.Event | None) -> None:
    """What the compute stream is given from now on runs after the event. The host does not wait.

    Memory that a copy was reading may be freed after this without `record_stream`: the allocator gives it to later work
    of the compute stream only, and at once, which it would not while the host runs ahead of the device.
    """
    if event is not None:
        torch.cuda.current_stream().wait_event(event)


def host_empty(nbytes: int, pinned: bool) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)


class Arena:
    """Host memory, handed out piece by piece and taken back as a whole. Pinning is slow, so slabs are never freed.

    Slabs have sizes of powers of two, to which PyTorch's pinned allocator rounds up anyway.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.slabs: list[Tensor] = []
        self.used: list[int] = []

    def take(self, nbytes: int) -> Tensor:
        """[nbytes] uint8."""
        size = -(-nbytes // ALIGNMENT) * ALIGNMENT
        for index, slab in enumerate(self.slabs):
            if self.used[index] + size <= len(slab):
                break
        else:
            index = len(self.slabs)
            self.slabs.append(host_empty(max(SLAB_BYTES, 1 << (size - 1).bit_length()), self.pinned))
            self.used.append(0)
        start = self.used[index]
        self.used[index] += size
        return self.slabs[index][start : start + nbytes]

    def clear(self) -> None:
        self.used = [0] * len(self.slabs)
