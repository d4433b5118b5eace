"""The device of a process, how much of it the process may hold, and how values get there from the host, and back."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from prl.config.errors import UserError

# of a GPU that two processes share, outside of PyTorch's allocator: CUDA contexts, NCCL, cuBLAS
CONTEXTS_BYTES = 3 * 1024**3


def pick_device(kind: str) -> torch.device:
    """deployment.device -> device; "auto" takes the first GPU that this process sees, if any. Raises UserError."""
    on_gpu = kind != "cpu" and torch.cuda.is_available()
    if kind == "cuda" and not on_gpu:
        raise UserError(
            "torch can use no GPU here.",
            where=f"deployment.device=cuda, on {socket.gethostname()}",
            why=f"torch.cuda.is_available() is false; torch {torch.__version__}, "
            f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', '')}",
            fix="python -m prl.doctor deployment.device=cuda says what is missing; deployment.device=cpu",
        )
    return torch.device("cuda", 0) if on_gpu else torch.device("cpu")


def limit_memory(device: torch.device, part: float) -> None:
    """Bound what PyTorch allocates on a GPU to a part of its memory: beyond it, torch.OutOfMemoryError. CPUs: nothing.

    Another process counts on the rest.
    """
    if device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(part, device)


def limit_memory_beside_engine(device: torch.device, engine_part: float) -> None:
    """Leave a part of the GPU to an engine on it, and room for the contexts of both processes."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        limit_memory(device, max(0.0, 1 - engine_part - CONTEXTS_BYTES / total))


def to_device(
    values: Tensor | np.ndarray | Sequence[int], device: torch.device, rows: np.ndarray | None = None
) -> Tensor:
    """A copy, of an array's `rows` alone if they are given, for which the host does not wait. A GPU reads it from
    pinned memory, which PyTorch gives to nobody else until that is done; from other memory, it would first end all that
    it was asked for before.
    """
    on_gpu = device.type == "cuda"
    if isinstance(values, Tensor):
        host = values.pin_memory() if on_gpu else values
    else:
        array = np.asarray(values)
        shape = array.shape if rows is None else (len(rows), *array.shape[1:])
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=on_gpu)
        if rows is None:
            np.copyto(host.numpy(), array)
        else:
            np.take(array, rows, axis=0, out=host.numpy(), mode="clip")  # which copies once, "raise" twice
    return host.to(device, non_blocking=on_gpu)


class HostCopy:
    """A small device tensor on its way to the host, so that the device can be given work before the host waits."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.to("cpu", non_blocking=True)  # into pinned memory
        self.arrived = torch.cuda.Event() if values.is_cuda else None
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.values
