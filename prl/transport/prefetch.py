"""A version that the trainer holds, brought near an engine while it still serves the one before (double buffering).

What is copied then is copied once for a host: a version that comes by `tcp` lies in memory without a name (memfd), as a
segment of `shared_memory` would, and all processes of an engine on this host map it. Checksums are worked out then,
too. Processes of the engine on other hosts, and those that come too late, fetch for themselves.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from prl.runtime.directory.identity import system_of_processes
from prl.runtime.process.free_memory import available_bytes
from prl.transport.boxes import Table
from prl.transport.shelves import Assembly, Shelf, pack_head
from prl.transport.weights_files import check_file, manifest_of
from prl.transport.weights_shared import Segment, aligned, map_segment, map_shared
from prl.transport.weights_tcp import fetch_tcp

LEFT = 0.1  # of the memory that is available stays so


@dataclass
class Prefetched:
    """A version that is near. `said` goes into its update_info as `near`, for who loads it."""

    update_info: dict[str, Any]
    said: dict[str, str]
    memory: list[int] = field(default_factory=list)  # file descriptors

    def amended(self) -> dict[str, Any]:
        return self.update_info | {"near": self.said}

    def close(self) -> None:
        """Memory stays for as long as somebody has it mapped."""
        while self.memory:
            os.close(self.memory.pop())


def prefetch(update_info: dict[str, Any], verify: bool) -> Prefetched:
    """Fetch what has to be fetched, and check it.

    Raises OSError when the source is not there, MemoryError where a copy of the version has no room, ValueError when a
    checksum does not match.
    """
    said = {"host": system_of_processes(), "path": "", "token": secrets.token_hex(16)}
    if update_info["type"] == "tcp":
        room = Room(said["token"].encode())
        try:
            fetch_tcp(update_info, verify, room.assembly).check_whole()
        except BaseException:
            os.close(room.memory)
            raise
        return Prefetched(update_info, said | {"path": f"/proc/{os.getpid()}/fd/{room.memory}"}, [room.memory])
    if update_info["type"] == "filesystem":
        for path, expected in manifest_of(Path(update_info["path"])):
            check_file(path, expected if verify else None)
    else:
        map_shared(update_info, verify)
    return Prefetched(update_info, said)


def is_near(update_info: dict[str, Any]) -> bool:
    """Whether a version was checked on this host, by a process that this one can see."""
    near = update_info.get("near")
    return near is not None and near["host"] == system_of_processes()


def near_segments(update_info: dict[str, Any]) -> list[Segment]:
    """The copy of a version on this host; none where it is on another, or there no more."""
    if not is_near(update_info) or not update_info["near"]["path"]:
        return []
    try:
        segment = map_segment(Path(update_info["near"]["path"]), None, verify=False)
    except (OSError, ValueError, struct.error):  # another's by now, or of a container that has other processes
        return []
    return [segment] if segment.said == update_info["near"]["token"].encode() else []


class Room:
    """Memory for a version, which is made once it is known how much it wants."""

    def __init__(self, token: bytes) -> None:
        self.token = token
        self.memory = os.memfd_create("prl-weights")

    def assembly(self, table: Table) -> Assembly:
        """Where its parts come together. Raises MemoryError where they have no room."""
        shelf = Shelf(table, table.whole())
        unchecked = np.zeros(len(shelf.parcels), dtype=np.uint32)
        head = pack_head(shelf, unchecked, self.token, with_table=True)
        begin, offsets, boxes = aligned(len(head)), shelf.offsets.tolist(), shelf.boxes.tolist()
        size = begin + shelf.nbytes
        room = available_bytes()
        if room is not None and size > room * (1 - LEFT):
            raise MemoryError(f"a copy of the weights has {size} bytes, and {room} are available")
        os.truncate(self.memory, size)
        buffer = mmap.mmap(self.memory, size)
        buffer[: len(head)] = head

        def place(number: int) -> Tensor:
            return shelf.view(buffer, boxes[number], begin + offsets[number])

        return Assembly(table, place)
