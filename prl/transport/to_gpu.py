"""Tensors of the host's memory onto a GPU, through a ring of pinned buffers that threads fill.

A copy straight from memory that is not pinned, as mapped weights are, goes as fast as one core reads them, and the host
waits for each. (The way out is `to_host.py`.)
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from prl.transport.buckets import Chunk

PINNED_BYTES = 16 << 20  # of one buffer
BUFFERS = 8  # of the ring
THREADS = 4  # that fill them
CHUNK_BYTES = 64 << 20  # of tensors that are handed on together, so that many are copied on in one kernel
NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass
class _Slot:
    buffer: Tensor
    sent: torch.cuda.Event | None = None  # behind the copy out of it


@dataclass(frozen=True)
class _Stretch:
    """A part of a tensor on its way; `whole`: the tensor, if this is the last part of it."""

    filled: Future[None] | None  # None: nothing has to move
    slot: _Slot
    place: Tensor
    whole: tuple[str, Tensor] | None


def on_device(chunks: Iterable[Chunk], device: torch.device) -> Iterator[Chunk]:
    """Tensors of the host, which stay as they are when the next ones are asked for, on a GPU: in the same order, in
    chunks of 64 MiB or of one tensor. What it has no room for stays where it is. They are on their way on the current
    stream, and not kept beyond their chunk.
    """
    with ThreadPoolExecutor(THREADS, "weights") as pool:
        ready: Chunk = []
        for named in _moved(chain.from_iterable(chunks), device, pool):
            ready.append(named)
            if sum(tensor.nbytes for _, tensor in ready) >= CHUNK_BYTES:
                yield ready
                ready = []
        if ready:
            yield ready


def _moved(named: Iterable[tuple[str, Tensor]], device: torch.device, pool: Executor) -> Iterator[tuple[str, Tensor]]:
    ring, count = _ring(device), 0
    on_the_way: deque[_Stretch] = deque()
    for name, tensor in named:
        place = _room(tensor, device)
        moves = place is not tensor
        source, target = (_bytes(x if moves else NOTHING) for x in (tensor, place))
        starts = range(0, max(len(source), 1), PINNED_BYTES)
        for first in starts:
            if len(on_the_way) == len(ring) and (whole := _send(on_the_way.popleft())):
                yield whole
            slot, part = ring[count % len(ring)], source[first : first + PINNED_BYTES]
            count += 1
            filled = pool.submit(_fill, slot, part) if len(part) else None
            done = (name, place) if first == starts[-1] else None
            on_the_way.append(_Stretch(filled, slot, target[first : first + PINNED_BYTES], done))
    while on_the_way:
        if whole := _send(on_the_way.popleft()):
            yield whole


def _room(tensor: Tensor, device: torch.device) -> Tensor:
    """Memory for it there; itself where there is none."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    except torch.OutOfMemoryError:
        return tensor


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(-1).view(torch.uint8)


def _fill(slot: _Slot, part: Tensor) -> None:
    if slot.sent is not None:
        slot.sent.synchronize()
    np.copyto(slot.buffer[: len(part)].numpy(), part.numpy())  # other threads run meanwhile


def _send(stretch: _Stretch) -> tuple[str, Tensor] | None:
    if stretch.filled is not None:
        stretch.filled.result()
        stretch.place.copy_(stretch.slot.buffer[: len(stretch.place)], non_blocking=True)
        if stretch.place.is_cuda:
            stretch.slot.sent = torch.cuda.Event()
            stretch.slot.sent.record()
    return stretch.whole


@functools.cache
def _ring(device: torch.device) -> list[_Slot]:
    """Of this process, which loads one version at a time."""
    pinned = device.type == "cuda"
    # vLLM loads under a default device that is a GPU
    buffers = [torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned) for _ in range(BUFFERS)]
    return [_Slot(buffer) for buffer in buffers]
