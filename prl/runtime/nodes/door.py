"""The root's door for the agents of other nodes: whoever connects proves first that he knows the token of the run.

    root -> agent   {"nonce": N}
    agent -> root   {"hello": node, "host": ..., "pid": ..., "nonce": M, "proof": HMAC(token, "agent" N node host M)}
    root -> agent   {"welcome": marker, "proof": HMAC(token, "root" M marker)}   or "superfluous" in place of "welcome"

Until then a connection has a line of bounded length and a few seconds, all are served at once, and when there are too
many, the one that has been silent for longest goes. Nothing that a stranger sends is more than a reason to hang up.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from prl.config.errors import UserError
from prl.runtime.nodes.wire import Message, Wire

HANDSHAKE_S = 5.0
LONGEST_HELLO = 2048  # bytes
MAX_STRANGERS = 128  # connections that have proved nothing yet
BACKLOG = 1024
PORT_TRIES = 20
NONCE_BYTES = 16


def proof_of(token: str, *words: object) -> str:
    """That who says these words knows the token."""
    return hmac.new(token.encode(), json.dumps([str(word) for word in words]).encode(), "sha256").hexdigest()


def proves(token: str, proof: object, *words: object) -> bool:
    said = proof.encode(errors="replace") if isinstance(proof, str) else b""
    return hmac.compare_digest(said, proof_of(token, *words).encode())


# --- the root's side --------------------------------------------------------------------------------------------------


@dataclass
class Stranger:
    connection: socket.socket
    nonce: str = field(default_factory=lambda: secrets.token_hex(NONCE_BYTES))
    deadline_s: float = field(default_factory=lambda: time.monotonic() + HANDSHAKE_S)
    said: bytes = b""


@dataclass(frozen=True)
class Arrival:
    """An agent that has proved itself; `wire` has told it that it is welcome."""

    node: int
    host: str
    wire: Wire


class Door:
    """Listens on some addresses of this host, at one port."""

    def __init__(
        self,
        addresses: Sequence[str],
        token: str,
        num_nodes: int,
        marker: str,
        is_free: Callable[[int], bool] = lambda node: True,
    ) -> None:
        """Raises UserError when none of the addresses is this host's. `is_free`: whether a node is still wanted."""
        self.token, self.num_nodes, self.marker, self.is_free = token, num_nodes, marker, is_free
        self.listeners = listen(addresses)
        self.port = int(self.listeners[0].getsockname()[1])
        self.joined: set[int] = set()
        self.strangers: dict[socket.socket, Stranger] = {}
        self.selector = selectors.DefaultSelector()
        for listener in self.listeners:
            self.selector.register(listener, selectors.EVENT_READ)

    def arrivals(self, wait_s: float) -> list[Arrival]:
        """Let in who has proved himself by now; waits `wait_s` at most for anything to happen."""
        arrived = []
        for key, _ in self.selector.select(wait_s):
            assert isinstance(key.fileobj, socket.socket)
            if key.fileobj in self.listeners:
                self._accept(key.fileobj)
            elif (stranger := self.strangers.get(key.fileobj)) is not None:  # not one that made room a moment ago
                arrival = self._hear(stranger)
                arrived += [] if arrival is None else [arrival]
        now = time.monotonic()
        for late in [stranger for stranger in self.strangers.values() if stranger.deadline_s < now]:
            self._hang_up(late)
        return arrived

    def close(self) -> None:
        for stranger in list(self.strangers.values()):
            self._hang_up(stranger)
        for listener in self.listeners:
            listener.close()
        self.selector.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # it is gone already, or there are no file descriptors left for it
            return
        connection.setblocking(False)
        if len(self.strangers) >= MAX_STRANGERS:
            self._hang_up(min(self.strangers.values(), key=lambda stranger: stranger.deadline_s))
        stranger = self.strangers[connection] = Stranger(connection)
        self.selector.register(connection, selectors.EVENT_READ)
        try:
            connection.send(json.dumps({"nonce": stranger.nonce}).encode() + b"\n")
        except OSError:
            self._hang_up(stranger)

    def _hang_up(self, stranger: Stranger) -> None:
        self._forget(stranger)
        stranger.connection.close()

    def _forget(self, stranger: Stranger) -> None:
        self.selector.unregister(stranger.connection)
        del self.strangers[stranger.connection]

    def _hear(self, stranger: Stranger) -> Arrival | None:
        try:
            data = stranger.connection.recv(LONGEST_HELLO)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        stranger.said += data
        line, end, _ = stranger.said.partition(b"\n")
        if not data or len(line) > LONGEST_HELLO:
            self._hang_up(stranger)
        elif end:
            hello = read_hello(line)
            words = () if hello is None else (hello["hello"], hello["host"], hello["nonce"])
            if hello is not None and proves(self.token, hello["proof"], "agent", stranger.nonce, *words):
                return self._answer(stranger, hello)
            self._hang_up(stranger)
        return None

    def _answer(self, stranger: Stranger, hello: Message) -> Arrival | None:
        self._forget(stranger)
        wire, node = Wire(stranger.connection), hello["hello"]
        wanted = 0 < node < self.num_nodes and node not in self.joined and self.is_free(node)
        answer = "welcome" if wanted else "superfluous"
        said = self.marker if wanted else str(node)
        wire.send({answer: said, "proof": proof_of(self.token, "root", hello["nonce"], answer, said)})
        if not wanted:
            wire.close()
            return None
        self.joined.add(node)
        return Arrival(node, hello["host"], wire)


def read_hello(line: bytes) -> Message | None:
    """What an agent says first; None for anything else."""
    with contextlib.suppress(ValueError, RecursionError):
        hello = json.loads(line)
        types = {"hello": int, "host": str, "pid": int, "nonce": str, "proof": str}
        if isinstance(hello, dict) and {key: type(value) for key, value in hello.items()} == types:
            return hello
    return None


def listen(addresses: Sequence[str]) -> list[socket.socket]:
    """Sockets that listen on those of the addresses that are this host's, all at one free port."""
    for _ in range(PORT_TRIES):
        held: list[socket.socket] = []
        taken = False
        for address in addresses:
            port = held[0].getsockname()[1] if held else 0
            try:
                held.append(socket.create_server((address, port), backlog=BACKLOG))
                held[-1].setblocking(False)
            except OSError as error:
                taken |= error.errno == errno.EADDRINUSE
        if held and not taken:
            return held
        for listener in held:
            listener.close()
    raise UserError(
        f"None of {', '.join(addresses) or 'no addresses'} is an address of this node.",
        where="deployment.type=multi_node",
        why="the other nodes reach this one by its name in SLURM, its host name, or the address of its default route",
        fix="a host name that resolves to an address of this host (/etc/hosts), or deployment=disaggregated",
    )


def addresses_of(hosts: Sequence[str]) -> list[str]:
    """IPv4 addresses of names and addresses, as this host resolves them."""
    found: list[str] = []
    for host in hosts:
        with contextlib.suppress(OSError, UnicodeError):
            found += [str(info[4][0]) for info in socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)]
    return list(dict.fromkeys(found))


# --- an agent's side --------------------------------------------------------------------------------------------------


def knock(connection: socket.socket, token: str, node: int, host: str, pid: int, limit_s: float) -> tuple[Wire, Any]:
    """Prove oneself to the root. Returns the connection and the run's marker, None if this node is not needed.

    Raises ConnectionError when who answers is not the root, or nobody does in time.
    """
    wire = Wire(connection)
    asked = wire.wait(HANDSHAKE_S)
    if asked is not None and isinstance(theirs := asked.get("nonce"), str):
        own = secrets.token_hex(NONCE_BYTES)
        proof = proof_of(token, "agent", theirs, node, host, own)
        wire.send({"hello": node, "host": host, "pid": pid, "nonce": own, "proof": proof})
        answer = wire.wait(limit_s) or {}
        for kind in ("welcome", "superfluous"):
            if kind in answer and proves(token, answer.get("proof"), "root", own, kind, answer[kind]):
                return wire, answer[kind] if kind == "welcome" else None
    wire.close()
    raise ConnectionError("the root did not prove itself")
