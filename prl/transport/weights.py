"""Weights from trainer to inference engines: by files, shared memory, TCP, NCCL, or a GPU that both are on.

After each step the trainer calls `publish(version, tensors, announce)`. What it announces, the `update_info`, travels
over the engines' /update_weights route, and the engine calls `stage(update_info)`. Tensors carry their Hugging Face
names, so any engine can load them. Checksums cover every byte and are verified on receipt when asked.

Host transports (filesystem, shared_memory, tcp) hold a version until engines have fetched it, while the trainer goes
on. Device transports (nccl, ipc) hold nothing: trainer and engines meet, and buckets pass from GPU to GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from prl.config.schema import WeightTransportConfig
from prl.transport.buckets import Announce, Chunk
from prl.transport.kinds import DEVICE_TRANSPORTS
from prl.transport.prefetch import is_near, near_segments
from prl.transport.receiving_nccl import receive_nccl
from prl.transport.shelves import Gather, alone
from prl.transport.weights_files import FilesystemPublisher, check_file, manifest_of, receive_files
from prl.transport.weights_ipc import receive_ipc
from prl.transport.weights_shared import SharedMemoryPublisher, map_shared, receive_shared, tensors_of
from prl.transport.weights_tcp import TcpPublisher, receive_tcp

NamedTensors = Iterable[tuple[str, Tensor]]


class Publisher(Protocol):
    def publish(self, version: int, tensors: NamedTensors, announce: Announce) -> None:
        """Deliver one version, or hold it ready, and announce the update_info that engines need for it."""

    def acknowledge(self) -> None:
        """Called when no engine needs the version last published any more."""


def make_publisher(
    config: WeightTransportConfig,
    weights_dir: Path,
    segments: Path,
    address: str,
    rank: int = 0,
    gather: Gather = alone,
) -> FilesystemPublisher | TcpPublisher | SharedMemoryPublisher:
    """A host transport's, of one rank. `segments`: what those of shared memory are called; `address`: of this host, for
    engines; `gather`: a collective of all ranks.
    """
    if config.type == "filesystem":
        return FilesystemPublisher(weights_dir, config.keep, rank=rank, gather=None if gather is alone else gather)
    if config.type == "tcp":
        return TcpPublisher(address, config.timeout_s, rank, gather)
    assert config.type == "shared_memory"
    return SharedMemoryPublisher(segments, rank, gather)


def receive(update_info: dict[str, Any], verify: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Named tensors of the version that `update_info` describes.

    Raises ValueError when a checksum does not match, OSError when the source is not there.
    """
    if update_info["type"] == "filesystem":
        return receive_files(Path(update_info["path"]), verify)
    if update_info["type"] == "tcp":
        return receive_tcp(update_info, verify)
    return receive_shared(update_info, verify)


def stage(update_info: dict[str, Any], verify: bool = True, device: torch.device | None = None) -> Iterable[Chunk]:
    """A version that is sure to be had, to be read once and later; what stays where it is costs no memory till then.

    A version of a device transport arrives while it is read, on `device`. What was prefetched on this host
    (`prefetch.py`) is not fetched and not checked again.

    Raises as `receive` does.
    """
    if update_info["type"] in DEVICE_TRANSPORTS:
        assert device is not None
        take = receive_nccl if update_info["type"] == "nccl" else receive_ipc
        return take(update_info, device)
    if update_info["type"] == "tcp":
        if segments := near_segments(update_info):
            return ([named] for named in tensors_of(segments))
        return [list(receive_tcp(update_info, verify))]
    verify = verify and not is_near(update_info)
    if update_info["type"] == "filesystem":
        for path, expected in manifest_of(Path(update_info["path"])):
            check_file(path, expected if verify else None)
    else:
        map_shared(update_info, verify)
    return ([named] for named in receive(update_info, verify=False))
