"""A stream of named tensors as flat buckets of bounded size on one device, and back.

A bucket is a run of bytes and its entries (`flat.Entry`, with a part's place within its tensor for tensors larger than
a bucket). The largest thing that ever exists besides the model is one bucket, or one tensor.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from prl.transport.flat import ALIGN, DTYPES, MAX_NAME, size_of

# [name, dtype, shape of the whole tensor, first byte of this part, its bytes, its offset in the bucket]
Part = list[Any]
# takes the update_info of a version; what it returns, if anything, is set when engines are told of it
Announce = Callable[[dict[str, Any]], threading.Event | None]
Chunk = list[tuple[str, Tensor]]  # named tensors that hold together, until the next chunk is asked for


@dataclass
class Run:
    """Parts that lie one after another both in their tensors' memory and in a bucket: copied as one."""

    data: Tensor  # bytes of the first part's tensor, [n] uint8
    first: int  # byte of `data`
    count: int  # bytes, which may go on beyond `data`
    offset: int  # in the bucket

    def goes_on(self, data: Tensor, first: int, offset: int) -> bool:
        """Whether a part is what follows; `data` of one memory with ours, not of a neighbour by chance."""
        return (
            offset == self.offset + self.count
            and data.data_ptr() + first == self.data.data_ptr() + self.first + self.count
            and data.untyped_storage().data_ptr() == self.data.untyped_storage().data_ptr()
        )

    def bytes(self) -> Tensor:
        return self.data.as_strided((self.count,), (1,), self.data.storage_offset() + self.first)


def parts_of(tensors: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> Iterator[tuple[list[Part], list[Run]]]:
    """Cut a stream into buckets: the parts of each, and where their bytes are. Experts of one stack are one run."""
    assert bucket_bytes % ALIGN == 0
    parts: list[Part] = []
    runs: list[Run] = []
    offset = 0
    for name, tensor in tensors:
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        dtype, shape = str(tensor.dtype).removeprefix("torch."), list(tensor.shape)
        first = 0
        while True:
            count = min(data.numel() - first, bucket_bytes - offset)
            parts.append([name, dtype, shape, first, count, offset])
            if runs and runs[-1].goes_on(data, first, offset):
                runs[-1].count += count
            else:
                runs.append(Run(data, first, count, offset))
            offset += -(-count // ALIGN) * ALIGN
            first += count
            if offset >= bucket_bytes:
                yield parts, runs
                parts, runs, offset = [], [], 0
            if first >= data.numel():
                break
    if parts:
        yield parts, runs


def fill(bucket: Tensor, runs: list[Run]) -> None:
    """Copy runs to their offsets; `bucket` [n] uint8. On a GPU many travel in one kernel."""
    places = [bucket[run.offset : run.offset + run.count] for run in runs]
    torch._foreach_copy_(places, [run.bytes() for run in runs], non_blocking=True)


def read_header(text: bytes | str, bucket_bytes: int) -> dict[str, Any]:
    """What the trainer says of a bucket: its `parts` and `checksum`, or that this is the `end`.

    Raises ValueError for what no trainer says, and for parts beyond the bucket.
    """
    header = json.loads(text)
    if header == {"end": True}:
        return header
    if not isinstance(header, dict) or header.keys() != {"parts", "checksum"} or not isinstance(header["parts"], list):
        raise ValueError("the header of a bucket has parts and a checksum")
    if not isinstance(header["checksum"], int | None):
        raise ValueError("the checksum of a bucket is an integer")
    for part in header["parts"]:
        if not isinstance(part, list) or len(part) != 6 or not isinstance(part[0], str) or len(part[0]) > MAX_NAME:
            raise ValueError("a part of a bucket is [name, dtype, shape, first, count, offset]")
        name, dtype, shape, *place = part
        if not all(type(number) is int and number >= 0 for number in place):
            raise ValueError(f"a part of {name} lies nowhere: {str(place)[:100]}")
        first, count, offset = place
        if offset + count > bucket_bytes or first + count > size_of(dtype, shape):
            raise ValueError(f"a part of {name} does not fit: {str(part[1:])[:200]}")
    return header


class Assembler:
    """Tensors out of buckets. Those that lie whole in a bucket are views of it: use them before the next one comes."""

    def __init__(self) -> None:
        self.unfinished: tuple[str, Tensor] | None = None  # a tensor of which parts are still to come

    def take(self, bucket: Tensor, parts: list[Part]) -> Chunk:
        """The tensors that are complete now."""
        complete: Chunk = []
        for name, dtype_name, shape, first, count, offset in parts:
            dtype, size = DTYPES[dtype_name], size_of(dtype_name, shape)
            piece = bucket[offset : offset + count]
            if count < size:
                if self.unfinished is None:
                    self.unfinished = name, torch.empty(size, dtype=torch.uint8, device=bucket.device)
                assert self.unfinished[0] == name
                whole = self.unfinished[1]
                whole[first : first + count].copy_(piece)
                if first + count < size:
                    continue
                piece, self.unfinished = whole, None
            complete.append((name, piece.view(dtype).view(shape)))
        return complete


def checksum(bucket: Tensor) -> int:
    """Sum of the bucket's 32-bit words, modulo 2^64: computed where the bytes are, at the speed of its memory."""
    return int(bucket.view(torch.int32).sum(dtype=torch.int64).item())
