"""One binary message: a JSON header and raw arrays. What training batches travel as between orchestrator and trainer.

Layout: 8-byte little-endian header length, UTF-8 JSON header {"meta": ..., "arrays": [[name, dtype, shape], ...]},
then the arrays' bytes one after another, each padded to 8 bytes so that decoding needs no copy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

_ALIGN = 8
PIECE = 256 << 10  # bytes of a large message that are sent at once


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


@dataclass(frozen=True)
class Message:
    """Bytes in several places: arrays are sent from where they lie, and copied nowhere."""

    parts: list[memoryview]

    def __len__(self) -> int:
        return sum(map(len, self.parts))

    def __bytes__(self) -> bytes:
        return b"".join(self.parts)

    def pieces(self, size: int = PIECE) -> Iterator[bytes | memoryview]:
        """All of it in order, at most about `size` bytes at a time; small parts together."""
        small: list[memoryview] = []
        held = 0
        for part in self.parts:
            if len(part) > size // 4:
                yield b"".join(small)
                small, held = [], 0
                yield from (part[start : start + size] for start in range(0, len(part), size))
            else:
                small, held = [*small, part], held + len(part)
                if held > size // 2:
                    yield b"".join(small)
                    small, held = [], 0
        yield b"".join(small)


def encode(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Message:
    """Serialise JSON-able `meta` and named arrays of any numeric dtype, which nobody may change from here on."""
    listing = [[name, a.dtype.str, list(a.shape)] for name, a in arrays.items()]
    header = json.dumps({"meta": meta, "arrays": listing}).encode()
    parts = [memoryview(len(header).to_bytes(8, "little") + header.ljust(_padded(len(header)), b" "))]
    for array in arrays.values():
        parts.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        if missing := _padded(array.nbytes) - array.nbytes:
            parts.append(memoryview(bytes(missing)))
    return Message(parts)


def decode(message: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
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
