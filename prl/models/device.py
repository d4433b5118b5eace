"""The device of a process, and how much of it the process may hold."""

from __future__ import annotations

import torch

# of a GPU that two processes share, outside of PyTorch's allocator: CUDA contexts, NCCL, cuBLAS
CONTEXTS_BYTES = 3 * 1024**3


def pick_device(kind: str) -> torch.device:
    """deployment.device -> device; "auto" takes the first GPU that this process sees, if any."""
    on_gpu = kind == "cuda" or (kind == "auto" and torch.cuda.is_available())
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
