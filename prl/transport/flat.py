"""Named tensors as one flat run of bytes: the layout that shared memory and TCP have in common."""

from __future__ import annotations

import math
import mmap
from typing import Any

import torch
from torch import Tensor

Entry = list[Any]  # [name, dtype, shape, offset in bytes, size in bytes], as JSON has it
ALIGN = 64  # bytes
# of tensors that travel: by their names in torch
DTYPES = {
    name: getattr(torch, name)
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool"),
    )
}
MAX_NAME = 1024  # characters
MAX_DIMENSIONS = 8


def layout_of(tensors: list[tuple[str, Tensor]]) -> tuple[list[Entry], int]:
    """An entry for each tensor, and the total size in bytes."""
    entries, offset = [], 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        entries.append([name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset, size])
        offset += -(-size // ALIGN) * ALIGN
    return entries, offset


def size_of(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor. Raises ValueError for what is none."""
    if dtype not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"no tensor is of dtype {str(dtype)[:50]!r} and shape {str(shape)[:50]}")
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"no tensor has the shape {str(shape)[:50]}")
    return math.prod(shape) * DTYPES[dtype].itemsize


def check_layout(layout: list[Entry], total: int) -> None:
    """Raises ValueError unless every entry is of a tensor that lies within `total` bytes."""
    for entry in layout:
        if not isinstance(entry, list) or len(entry) != 5:
            raise ValueError("an entry of the layout is [name, dtype, shape, offset, size]")
        name, dtype, shape, offset, size = entry
        if not isinstance(name, str) or len(name) > MAX_NAME:
            raise ValueError(f"no tensor has the name {str(name)[:50]!r}")
        inside = type(offset) is int and type(size) is int and offset >= 0 and offset % ALIGN == 0
        if size_of(dtype, shape) != size or not inside or offset + size > total:
            raise ValueError(f"the layout of {name} does not fit: {str(entry[1:])[:200]} in {total} bytes")


def tensor_at(buffer: mmap.mmap | bytearray, dtype: str, shape: list[int], offset: int, size: int) -> Tensor:
    """The tensor of an entry, as a view of the buffer."""
    torch_dtype = DTYPES[dtype]
    return torch.frombuffer(buffer, dtype=torch_dtype, count=size // torch_dtype.itemsize, offset=offset).view(shape)
