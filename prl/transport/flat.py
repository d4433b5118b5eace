"""Tensors as runs of bytes: which there are."""

from __future__ import annotations

import math

import torch

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


def size_of(dtype: str, shape: list[int]) -> int:
    """Bytes of a tensor. Raises ValueError for what is none."""
    if dtype not in DTYPES or not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"no tensor is of dtype {str(dtype)[:50]!r} and shape {str(shape)[:50]}")
    if not all(type(length) is int and 0 <= length < 1 << 48 for length in shape):
        raise ValueError(f"no tensor has the shape {str(shape)[:50]}")
    return math.prod(shape) * DTYPES[dtype].itemsize
