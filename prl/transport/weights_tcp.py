"""Weights over TCP: the first trainer rank holds each new version in host memory, and every engine fetches it.

No filesystem is involved. A connection opens with the version's key, a random secret that engines learn from the
update_info, and is answered by the version's bytes. How long an engine may take is bounded by
`weight_transport.timeout_s`; an error names the peer.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import socketserver
import threading
import time
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from prl.transport.buckets import Announce
from prl.transport.flat import layout_of, tensor_at
from prl.transport.stores import family_of

KEY_BYTES = 32
KEY_S = 10.0  # until it must have come
MAX_STRANGERS = 512  # connections whose key has not
CHUNK_BYTES = 1 << 24


class Handler(socketserver.BaseRequestHandler):
    """One engine's fetch of one version."""

    server: WeightServer

    def handle(self) -> None:
        if not self.server.strangers.acquire(blocking=False):
            return  # too many who have shown no key yet
        try:
            # an engine sends its key in one piece
            key = read_exactly(self.request, bytearray(KEY_BYTES), within_s=min(KEY_S, self.server.timeout_s))
        except OSError:
            return  # the engine reports it
        finally:
            self.server.strangers.release()
        data = self.server.version_of(bytes(key))
        if data is None:  # it is of no version that is still held: the engine sees the end at once
            return
        self.request.settimeout(self.server.timeout_s)
        with contextlib.suppress(OSError):
            self.request.sendall(data)


class WeightServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address_family = family_of(address)
        super().__init__((address, 0), Handler)
        self.timeout_s = timeout_s
        self.versions: dict[bytes, bytearray] = {}  # key -> bytes
        self.strangers = threading.BoundedSemaphore(MAX_STRANGERS)

    def version_of(self, key: bytes) -> bytearray | None:
        return next((data for known, data in self.versions.items() if hmac.compare_digest(known, key)), None)


class TcpPublisher:
    """Holds the version last published until it is acknowledged."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address = address
        self.server = WeightServer(address, timeout_s)
        threading.Thread(target=self.server.serve_forever, name="weights", daemon=True).start()

    def publish(self, version: int, tensors: Iterable[tuple[str, Tensor]], announce: Announce) -> None:
        named = [(name, tensor.detach().cpu()) for name, tensor in tensors]
        entries, size = layout_of(named)
        buffer = bytearray(size)
        for (_, tensor), (_, *place) in zip(named, entries, strict=True):
            if tensor.numel():
                tensor_at(buffer, *place).copy_(tensor)
        key = secrets.token_bytes(KEY_BYTES)
        self.server.versions = {key: buffer}
        announce(
            {
                "type": "tcp",
                "host": self.address,
                "port": self.server.server_address[1],
                "key": key.hex(),
                "version": version,
                "size": size,
                "layout": entries,
                "crc32": zlib.crc32(buffer),
                "timeout_s": self.server.timeout_s,
            }
        )

    def acknowledge(self) -> None:
        self.server.versions = {}


def receive_tcp(update_info: dict[str, Any], verify: bool) -> Iterator[tuple[str, Tensor]]:
    """Raises OSError that names the trainer when it cannot be reached or ends early, ValueError for damaged bytes."""
    peer = f"{update_info['host']}:{update_info['port']}"
    try:
        address = (update_info["host"], update_info["port"])
        with socket.create_connection(address, timeout=update_info["timeout_s"]) as connection:
            connection.sendall(bytes.fromhex(update_info["key"]))
            buffer = read_exactly(connection, bytearray(update_info["size"]))
    except OSError as error:
        what = f"weights version {update_info['version']} from the trainer at {peer}"
        raise OSError(f"{what}: {error or type(error).__name__}") from error
    if verify and (found := zlib.crc32(buffer)) != update_info["crc32"]:
        raise ValueError(f"the bytes from {peer} are damaged: CRC-32 {found:08x}, sent as {update_info['crc32']:08x}")
    for name, *place in update_info["layout"]:
        yield name, tensor_at(buffer, *place)


def read_exactly(connection: socket.socket, buffer: bytearray, within_s: float | None = None) -> bytearray:
    """Fill the buffer. Raises ConnectionError when the other side ends before, TimeoutError when all of it has not come
    within so many seconds (None: as the connection's own time-out has it, from one piece to the next).
    """
    view, began = memoryview(buffer), time.monotonic()
    while view:
        if within_s is not None:
            left_s = began + within_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{len(view)} of {len(buffer)} bytes had not come after {within_s:g} s")
            connection.settimeout(left_s)
        count = connection.recv_into(view, min(len(view), CHUNK_BYTES))
        if count == 0:
            raise ConnectionError(f"the other side ended with {len(view)} of {len(buffer)} bytes missing")
        view = view[count:]
    return buffer
