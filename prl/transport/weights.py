"""Weights from trainer to inference engines: by files, shared memory, TCP, NCCL, or a GPU that both are on.

After each step the trainer calls `publish(version, tensors, announce)`. What it announces, the `update_info`, travels
over the engines' /update_weights route, and the engine calls `stage(update_info)`. Tensors carry their Hugging Face
names, so any engine can load them. Checksums cover every byte and are verified on receipt when asked.

Host transports (filesystem, shared_memory, tcp) hold a version until engines have fetched it, while the trainer goes
on. Device transports (nccl, ipc) hold nothing: trainer and engines meet, and buckets pass from GPU to GPU.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prl.config.errors import PassingError, UserError
from prl.config.schema import WeightTransportConfig
from prl.transport.buckets import Announce, Chunk
from prl.transport.flat import layout_of, tensor_at
from prl.transport.kinds import DEVICE_TRANSPORTS
from prl.transport.receiving_nccl import receive_nccl
from prl.transport.weights_files import FilesystemPublisher, check_file, manifest_of, receive_files
from prl.transport.weights_ipc import receive_ipc
from prl.transport.weights_tcp import TcpPublisher, receive_tcp

NamedTensors = Iterable[tuple[str, Tensor]]


class Publisher(Protocol):
    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> None:
        """Deliver one version, or hold it ready, and announce the update_info that engines need for it."""

    def acknowledge(self) -> None:
        """Called when no engine needs the version last published any more."""


def make_publisher(config: WeightTransportConfig, weights_dir: Path, segments: Path, address: str) -> Publisher:
    """A host transport's. `segments`: what those of shared memory are called; `address`: of this host, for engines."""
    if config.type == "filesystem":  # of one rank
        return FilesystemPublisher(weights_dir, config.keep)
    if config.type == "tcp":
        return TcpPublisher(address, config.timeout_s)
    assert config.type == "shared_memory"
    return SharedMemoryPublisher(segments)


def receive(update_info: dict[str, Any], verify: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of the version that `update_info` describes.

    Raises ValueError when a checksum does not match, OSError when the source is not there.
    """
    if update_info["type"] == "filesystem":
        return receive_files(Path(update_info["path"]), verify)
    if update_info["type"] == "tcp":
        return receive_tcp(update_info, verify)
    return _receive_shared(update_info, verify)


def stage(update_info: dict[str, Any], verify: bool = True, device: torch.device | None = None) -> Iterable[Chunk]:
    """A version that is sure to be had, to be read once and later; what stays where it is costs no memory till then.

    A version of a device transport arrives while it is read, on `device`.

    Raises as `receive` does.
    """
    if update_info["type"] in DEVICE_TRANSPORTS:
        assert device is not None
        take = receive_nccl if update_info["type"] == "nccl" else receive_ipc
        return take(update_info, device)
    if update_info["type"] == "tcp":
        return [list(receive_tcp(update_info, verify))]
    if update_info["type"] == "filesystem":
        for path, expected in manifest_of(Path(update_info["path"])):
            check_file(path, expected if verify else None)
    else:
        _map_shared(update_info, verify)
    return ([named] for named in receive(update_info, verify=False))


# --- shared memory ----------------------------------------------------------------------------------------------------


class SharedMemoryPublisher:
    """One segment of POSIX shared memory per version.

    Its name is unlinked when the version is acknowledged, so memory lives only as long as somebody maps it. A name
    left by a killed run is the root's to remove (it has given it).
    """

    def __init__(self, path: Path) -> None:
        self.prefix = path
        self.path: Path | None = None  # of the version that is held

    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> None:
        named = [(name, t.detach().cpu()) for name, t in tensors]
        entries, size = layout_of(named)
        self.acknowledge()
        # a name of its own, so that a late engine finds its version or none
        self.path = self.prefix.with_name(f"{self.prefix.name}-{version}")
        self.path.unlink(missing_ok=True)
        with open(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600), "r+b") as file:
            try:
                # so that a full /dev/shm is an error here, not a SIGBUS later
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                self.path.unlink()
                raise _kind_of_shortage(self.path, size)(
                    f"{size} bytes of shared memory for weights version {version} are not to be had: {error}",
                    where=str(self.path),
                    why="weight_transport=shared_memory holds a whole copy of the weights in /dev/shm",
                    fix="enlarge /dev/shm, or use weight_transport=filesystem",
                ) from error
            buffer = mmap.mmap(file.fileno(), size)
        for (_, tensor), (_, dtype, shape, offset, nbytes) in zip(named, entries, strict=True):
            tensor_at(buffer, dtype, shape, offset, nbytes).copy_(tensor)
        announce(
            {
                "type": "shared_memory",
                "path": str(self.path),
                "version": version,
                "layout": entries,
                "crc32": zlib.crc32(buffer),
            }
        )

    def acknowledge(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _kind_of_shortage(path: Path, size: int) -> type[UserError]:
    """Whether others take the room, who may leave, or the place is too small for so many bytes even when empty."""
    place = os.statvfs(path.parent)
    return PassingError if size < place.f_blocks * place.f_frsize else UserError


def _map_shared(update_info: dict[str, Any], verify: bool) -> mmap.mmap:
    path = update_info["path"]
    with open(path, "r+b") as file:
        buffer = mmap.mmap(file.fileno(), 0)
    if verify and (found := zlib.crc32(buffer)) != update_info["crc32"]:
        raise ValueError(f"{path} is damaged: CRC-32 {found:08x}, written as {update_info['crc32']:08x}")
    return buffer


def _receive_shared(update_info: dict[str, Any], verify: bool) -> Iterator[tuple[str, Tensor]]:
    buffer = _map_shared(update_info, verify)
    for name, dtype, shape, offset, size in update_info["layout"]:
        yield name, tensor_at(buffer, dtype, shape, offset, size)
