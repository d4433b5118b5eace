"""Weights over TCP: each trainer rank holds its part of a new version in host memory, and every engine fetches all.

No filesystem is involved. A connection opens with the version's key, a random secret that engines learn from the
update_info, and is answered by what the first rank has, which also says where the others are, with their keys. How long
an engine may take is bounded by `weight_transport.timeout_s`; an error names the peer.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import socketserver
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from torch import Tensor

from prl.transport.addresses import family_of
from prl.transport.boxes import Table
from prl.transport.buckets import Announce
from prl.transport.shelves import THREADS, Assembly, Gather, Keeper, Shelf, alone, pack_head, read_head

KEY_BYTES = 32
KEY_S = 10.0  # until it must have come
MAX_STRANGERS = 512  # connections whose key has not
CHUNK_BYTES = 1 << 24

Room = TypeVar("Room", bytearray, memoryview)


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
        version = self.server.version_of(bytes(key))
        if version is None:  # it is of no version that is still held: the engine sees the end at once
            return
        self.request.settimeout(self.server.timeout_s)
        with contextlib.suppress(OSError):
            for data in version:
                self.request.sendall(data)


class WeightServer(socketserver.ThreadingTCPServer):
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, address: str, timeout_s: float) -> None:
        self.address_family = family_of(address)
        super().__init__((address, 0), Handler)
        self.timeout_s = timeout_s
        self.versions: dict[bytes, tuple[bytes, bytearray]] = {}  # key -> head and parts
        self.strangers = threading.BoundedSemaphore(MAX_STRANGERS)

    def version_of(self, key: bytes) -> tuple[bytes, bytearray] | None:
        return next((data for known, data in self.versions.items() if hmac.compare_digest(known, key)), None)


class TcpPublisher(Keeper):
    """One trainer rank's. It holds the version last published until that is acknowledged."""

    def __init__(self, address: str, timeout_s: float, rank: int = 0, gather: Gather = alone) -> None:
        super().__init__(rank, gather)
        self.address = address
        self.server = WeightServer(address, timeout_s)
        threading.Thread(target=self.server.serve_forever, name="weights", daemon=True).start()

    def publish(self, version: int, parts: Iterable[Tensor], announce: Announce) -> None:
        """`parts`: of each box that this rank holds. The first rank announces. A collective."""
        data = bytearray(self.shelf.nbytes)
        sums = self.shelf.fill(data, self.kept(parts))
        key = secrets.token_bytes(KEY_BYTES)
        own = json.dumps([self.address, self.server.server_address[1], key.hex()]).encode()
        if self.rank:
            self.server.versions = {key: (pack_head(self.shelf, sums, b"", with_table=False), data)}
        others = [json.loads(word) for word in self.gather(own)[1:]]  # all others serve theirs by now
        if self.rank:
            return
        said = json.dumps(others).encode()
        self.server.versions = {key: (pack_head(self.shelf, sums, said, with_table=True), data)}
        announce(
            {
                "type": "tcp",
                "host": self.address,
                "port": self.server.server_address[1],
                "key": key.hex(),
                "version": version,
                "timeout_s": self.server.timeout_s,
            }
        )

    def acknowledge(self) -> None:
        """A collective: the first rank knows when engines have it."""
        self.gather(b"")
        self.server.versions = {}


class _Fetch:
    """A version's part from one trainer rank, which is read from its connection as it is asked for."""

    def __init__(self, host: str, port: int, key: str, timeout_s: float) -> None:
        """Raises OSError that names the rank."""
        self.peer, self.timeout_s = f"{host}:{port}", timeout_s
        with self.naming():
            self.connection = socket.create_connection((host, port), timeout=timeout_s)
            self.connection.sendall(bytes.fromhex(key))

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise OSError(f"from the trainer at {self.peer}: {error or type(error).__name__}") from error
        except ValueError as error:
            raise ValueError(f"from the trainer at {self.peer}: {error}") from error

    def read(self, count: int) -> bytes:
        return bytes(read_exactly(self.connection, bytearray(count)))

    def head(self, table: Table | None) -> tuple[Shelf, list[int], bytes]:
        with self.naming():
            shelf, sums, said = read_head(self.read, table)
        return shelf, sums.tolist(), said

    def take(self, shelf: Shelf, sums: list[int], into: Assembly, verify: bool, rooms: int) -> None:
        """All parcels, through so many pieces of memory: some are checked and put where they belong while the next
        comes. Raises ValueError for damaged bytes.
        """
        size = max((stop - begin for begin, stop, _ in shelf.parcels), default=0)

        def put(room: bytearray, number: int) -> bytearray:
            begin, stop, pieces = shelf.parcels[number]
            if verify and (found := zlib.crc32(memoryview(room)[: stop - begin])) != sums[number]:
                told = f"CRC-32 {found:08x}, sent as {sums[number]:08x}"
                raise ValueError(f"the bytes from {self.peer} are damaged: {told}")
            for piece, offset in pieces:
                into.put(piece, shelf.view(room, piece, offset))
            return room

        with self.naming(), self.connection, ThreadPoolExecutor(rooms, "parcels") as pool:
            putting: deque[Future[bytearray]] = deque()
            for number, (begin, stop, _) in enumerate(shelf.parcels):
                room = putting.popleft().result() if len(putting) == rooms else bytearray(size)
                read_exactly(self.connection, memoryview(room)[: stop - begin])
                putting.append(pool.submit(put, room, number))
            while putting:
                putting.popleft().result()


def receive_tcp(update_info: dict[str, Any], verify: bool) -> Iterator[tuple[str, Tensor]]:
    """Raises as `fetch_tcp` does."""
    assembly = fetch_tcp(update_info, verify, Assembly)
    for number, name in enumerate(assembly.table.names):
        yield name, assembly.take(number)


def fetch_tcp(update_info: dict[str, Any], verify: bool, assemble: Callable[[Table], Assembly]) -> Assembly:
    """From all trainer ranks at the same time. Raises OSError that names the trainer when it cannot be reached or ends
    early, ValueError for damaged bytes.
    """
    timeout_s = update_info["timeout_s"]
    try:
        first = _Fetch(update_info["host"], update_info["port"], update_info["key"], timeout_s)
        shelf, sums, said = first.head(None)
        into = assemble(shelf.table)

        others = json.loads(said)
        rooms = max(2, THREADS // (1 + len(others)))

        def take(host: str, port: int, key: str) -> None:
            fetch = _Fetch(host, port, key, timeout_s)
            fetch.take(*fetch.head(into.table)[:2], into, verify, rooms)

        with ThreadPoolExecutor(THREADS, "weights") as pool:
            taking = [pool.submit(first.take, shelf, sums, into, verify, rooms)]
            taking += [pool.submit(take, *other) for other in others]
            try:
                while taking:  # none keeps its name here: an error would hold this frame, and all memory, in a cycle
                    taking.pop(0).result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)  # what has not begun would only be waited for
                raise
    except OSError as error:
        raise OSError(f"weights version {update_info['version']} {error}") from error
    return into


def read_exactly(connection: socket.socket, buffer: Room, within_s: float | None = None) -> Room:
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
