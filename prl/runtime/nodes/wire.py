"""Messages between the root and the agents of other nodes: JSON objects, one a line, over one TCP connection each."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from typing import Any

SEND_LIMIT_S = 10.0
PING_INTERVAL_S = 2.0
SILENCE_LIMIT_S = 60.0  # a node that has not even pinged for so long is lost
PING = {"ping": 1}
LONGEST_LINE = 1 << 24  # bytes

Message = dict[str, Any]


class Wire:
    """One connection. Reading never waits; an error or the other side's end makes it `closed`, once and for all."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SEND_LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection = connection
        self.closed = False
        self.heard_s = self.pinged_s = time.monotonic()
        self._readable = select.poll()  # select.select refuses file descriptors above 1023
        self._readable.register(connection, select.POLLIN)
        self._pending = b""
        self._inbox: list[Message] = []  # read, and not yet given to anybody
        self._sending = threading.Lock()  # the pinger sends beside the main thread

    @property
    def own_address(self) -> str:
        """The address of this host by which the other side reaches it."""
        return str(self.connection.getsockname()[0])

    def send(self, message: Message) -> None:
        with self._sending, contextlib.suppress(OSError):
            if not self.closed:
                self.connection.sendall(json.dumps(message).encode() + b"\n")
                return
        self.closed = True

    def ping(self) -> None:
        """A sign of life, if one is due."""
        if time.monotonic() - self.pinged_s >= PING_INTERVAL_S:
            self.pinged_s = time.monotonic()
            self.send(PING)

    def poll(self) -> list[Message]:
        """What has come since. Pings only count as signs of life."""
        while not self.closed and self._readable.poll(0):
            try:
                data = self.connection.recv(1 << 16)
            except OSError:
                data = b""
            self.closed = not data or len(self._pending) > LONGEST_LINE
            self._pending += data
            self.heard_s = time.monotonic()
        *lines, self._pending = self._pending.split(b"\n")
        try:
            messages = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):  # not one of ours
            messages = [None]
        if not all(isinstance(message, dict) for message in messages):
            self.closed = True
            messages = []
        given, self._inbox = [*self._inbox, *(message for message in messages if message != PING)], []
        return given

    def wait(self, limit_s: float) -> Message | None:
        """The next message; those after it are left to `poll`. None if it does not come."""
        deadline = time.monotonic() + limit_s
        while True:
            messages = self.poll()
            if messages:
                self._inbox = messages[1:]
                return messages[0]
            if self.closed or time.monotonic() > deadline:
                return None
            time.sleep(0.01)

    @property
    def lost(self) -> str | None:
        """Why nobody is on the other side any more, or None."""
        if self.closed:
            return "its connection closed"
        silent_s = time.monotonic() - self.heard_s
        return f"no sign of life for {silent_s:.0f} s" if silent_s > SILENCE_LIMIT_S else None

    def close(self) -> None:
        self.closed = True
        self.connection.close()
