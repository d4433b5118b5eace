"""One binary message: a JSON header and raw arrays. What training batches travel as between orchestrator and trainer.

Layout: 8-byte little-endian header length, UTF-8 JSON header {"meta": ..., "arrays": [[name, dtype, shape], ...]},
then the arrays' bytes one after another, each padded to 8 bytes so that decoding needs no copy.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

_ALIGN = 8


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def encode(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    """Serialise JSON-able `meta` and named arrays of any numeric dtype."""
    listing = [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()]
    header = json.dumps({"meta": meta, "arrays": listing}).encode()
    parts = [len(header).to_bytes(8, "little"), header.ljust(_padded(len(header)), b" ")]
    for array in arrays.values():
        data = np.ascontiguousarray(array).tobytes()
        parts.append(data.ljust(_padded(len(data)), b"\0"))
    return b"".join(parts)


def decode(message: bytes | bytearray) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Inverse of `encode`; arrays are views into `message`. Raises ValueError when the message is cut short."""
    view = memoryview(message)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 + length:
        raise ValueError(f"message of {len(view)} bytes is cut short: its header alone needs {8 + length}")
    header = json.loads(bytes(view[8 : 8 + length]))
    offset = 8 + _padded(length)
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        count = int(np.prod(shape, dtype=np.int64))
        size = count * np.dtype(dtype).itemsize
        if offset + size > len(view):
            raise ValueError(f"message of {len(view)} bytes is cut short inside array {name!r}")
        arrays[name] = np.frombuffer(view, dtype=dtype, count=count, offset=offset).reshape(shape)
        offset += _padded(size)
    return header["meta"], arrays
