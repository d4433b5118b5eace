"""Named tensors as one flat run of bytes: the layout that shared memory and TCP have in common."""

from __future__ import annotations

import mmap
from typing import Any

import torch
from torch import Tensor

Entry = list[Any]  # [name, dtype, shape, offset in bytes, size in bytes], as JSON has it
ALIGN = 64  # bytes


def layout_of(tensors: list[tuple[str, Tensor]]) -> tuple[list[Entry], int]:
    """An entry for each tensor, and the total size in bytes."""
    entries, offset = [], 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, size])
        offset += -(-size // ALIGN) * ALIGN
    return entries, offset


def tensor_at(buffer: mmap.mmap | bytearray, dtype: str, shape: list[int], offset: int, size: int) -> Tensor:
    """The tensor of an entry, as a view of the buffer."""
    torch_dtype = getattr(torch, dtype)
    return torch.frombuffer(buffer, dtype=torch_dtype, count=size // torch_dtype.itemsize, offset=offset).view(shape)
