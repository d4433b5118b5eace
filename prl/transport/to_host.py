"""Tensors of a GPU into memory of the host: cast before they move, through a few pinned buffers that threads empty.

A copy straight into memory that is not pinned makes the host wait for each tensor, moves float32, and casts there.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from queue import SimpleQueue

import numpy as np
import torch
from torch import Tensor

PINNED_BYTES = 32 << 20  # of one buffer
BUFFERS = 4  # of this process


_making = threading.Lock()  # functools.cache lets several threads make one each


def pinned_buffers() -> SimpleQueue[Tensor]:
    """Those of this process that nothing is in."""
    with _making:
        return _made_once()


@functools.cache
def _made_once() -> SimpleQueue[Tensor]:
    free: SimpleQueue[Tensor] = SimpleQueue()
    for _ in range(BUFFERS):
        free.put(torch.empty(PINNED_BYTES, dtype=torch.uint8, device="cpu", pin_memory=torch.cuda.is_available()))
    return free


def is_elsewhere(part: Tensor) -> bool:
    """Whether it is not in the host's memory."""
    return part.is_cuda


def move(part: Tensor, place: Tensor, pool: Executor) -> Iterator[Future[None]]:
    """Begin to copy `part`, of any dtype and on any device, into `place`, contiguous, on the host, of as many elements.

    Each result is a stretch of `place` on its way, in order. Waits for a buffer where all are taken.
    """
    source, target, free = part.detach().reshape(-1), place.view(-1), pinned_buffers()
    count = PINNED_BYTES // target.element_size()
    for first in range(0, len(target), count):
        stretch = target[first : first + count]
        buffer = free.get()
        try:
            staged = buffer[: stretch.nbytes]
            staged.view(target.dtype).copy_(source[first : first + count].to(target.dtype), non_blocking=True)
            event = torch.cuda.Event() if source.is_cuda else None
            if event is not None:
                event.record()
            moving = pool.submit(_empty, free, buffer, event, staged, stretch)
        except BaseException:
            free.put(buffer)
            raise
        yield moving


def _empty(
    free: SimpleQueue[Tensor], buffer: Tensor, event: torch.cuda.Event | None, staged: Tensor, stretch: Tensor
) -> None:
    try:
        if event is not None:
            event.synchronize()
        np.copyto(stretch.view(torch.uint8).numpy(), staged.numpy())  # other threads run meanwhile
    finally:
        free.put(buffer)
