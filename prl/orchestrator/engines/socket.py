"""Requests to sample over one websocket to an engine, in place of an HTTP request each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.requests import GENERATE
from prl.transport.answers import decode_answer
from prl.transport.sampling_socket import cancel_text, frames_of, read_parts, request_text

Call = Callable[[str, str, str, dict[str, Any]], Awaitable[dict[str, Any]]]
HEARTBEAT_S = 120.0  # an engine that answers no ping for half of it is gone: a connection idles through training steps
CLOSE_S = 0.5
REFUSING = (aiohttp.WSCloseCode.POLICY_VIOLATION, aiohttp.WSCloseCode.MESSAGE_TOO_BIG)


class Refused(Exception):
    """By the engine, all that was asked over a connection: its words."""


class SamplingSocket:
    """To one engine: connected when something is asked first, and again when it was lost.

    Args:
        call: (method, url, route, body) -> answer, by HTTP: for an engine that takes no such connection, and says why.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str, call: Call) -> None:
        self.session, self.url, self.call = session, url, call
        self.connecting = asyncio.Lock()
        self.link: Link | None = None
        self.links: set[Link] = set()  # this one, and those over which answers are still to come

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to a body of GENERATE. Raises EngineError; who is cancelled cancels what was asked."""
        link = self.link
        try:
            async with asyncio.timeout(self.session.timeout.total):
                if link is None or link.over:
                    link = await self._connect()
                status, answer = await link.ask(body)
        except aiohttp.WSServerHandshakeError:
            return await self.call("POST", self.url, GENERATE, body)
        except Refused as error:
            raise EngineError.of_status(self.url, GENERATE, 400, str(error)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            if self.link is link:
                self.leave()
            raise EngineError.of_silence(self.url, GENERATE, error) from error
        if status != 200:
            raise EngineError.of_status(self.url, GENERATE, status, answer.decode(errors="replace"))
        return decode_answer(answer)

    def leave(self) -> None:
        """What is asked from now on goes over another connection: this one may be dead."""
        if self.link is not None:
            self.link.retire()
        self.link = None

    async def _connect(self) -> Link:
        async with self.connecting:
            if self.link is None or self.link.over:
                closing = aiohttp.ClientWSTimeout(ws_close=CLOSE_S)
                url, heartbeat = self.url + GENERATE, HEARTBEAT_S
                socket = await self.session.ws_connect(url, max_msg_size=0, timeout=closing, heartbeat=heartbeat)
                self.link = link = Link(socket)
                self.links.add(link)
                link.reader.add_done_callback(lambda _: self.links.discard(link))
            return self.link

    async def close(self) -> None:
        await asyncio.gather(*(link.close() for link in [*self.links]))


class Link:
    """One connection, and what is asked over it."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.over = self.retired = False  # nothing more may be asked: the other end has gone, or went wrong; or should
        self.numbers = itertools.count()
        self.waiting: dict[int, asyncio.Future[tuple[int, bytes]]] = {}
        self.begun: dict[int, list[bytes | memoryview]] = {}  # answers of which more is to come
        self.outbox: list[str] = []  # goes out at the end of this turn of the event loop
        self.sending: asyncio.Task[None] | None = None
        self.closing: asyncio.Task[None] | None = None
        self.reader = asyncio.create_task(self._read())

    async def ask(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Status and answer. Raises Refused, and ClientError when the connection ends before."""
        number = next(self.numbers)
        text = request_text(number, body)
        future = self.waiting[number] = asyncio.get_running_loop().create_future()
        self._post(text)
        try:
            return await future
        finally:
            del self.waiting[number]
            self.begun.pop(number, None)
            if not future.done() or future.cancelled():
                self._post(cancel_text(number))
            self._close_if_done()

    def retire(self) -> None:
        """Close as soon as nobody waits for an answer."""
        self.retired = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        if self.retired and not self.waiting and self.closing is None:
            self.closing = asyncio.create_task(self.close())

    async def close(self) -> None:
        try:
            await asyncio.wait_for(self.socket.close(), 2 * CLOSE_S)
        except (TimeoutError, aiohttp.ClientError, ConnectionError):  # it takes nothing any more
            self.reader.cancel()
        await asyncio.wait([self.reader])

    def _post(self, text: str) -> None:
        self.outbox.append(text)
        if self.sending is None and not self.over:
            self.sending = asyncio.create_task(self._send())

    async def _send(self) -> None:
        try:
            while self.outbox:
                texts, self.outbox = self.outbox, []
                for frame in frames_of(texts):
                    await self.socket.send_str(frame)
        except (aiohttp.ClientError, ConnectionError):
            self._end(aiohttp.ServerDisconnectedError())
        finally:
            self.sending = None

    async def _read(self) -> None:
        error: Exception = aiohttp.ServerDisconnectedError()
        try:
            while (message := await self.socket.receive()).type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.TEXT):
                self._take(message.data)
            if message.type == aiohttp.WSMsgType.CLOSE and message.data in REFUSING:
                error = Refused(message.extra or "it hung up on what it was asked")
        except (ValueError, TypeError):  # no answers of an engine
            self._end(error)
            await self.socket.close()
        finally:
            self._end(error)

    def _take(self, frame: bytes) -> None:
        for number, status, more, payload in read_parts(frame):
            if (future := self.waiting.get(number)) is None:
                continue  # nobody waits any more
            pieces = self.begun.setdefault(number, [])
            pieces.append(payload)
            if not more and not future.done():
                future.set_result((status, b"".join(pieces)))

    def _end(self, error: Exception) -> None:
        self.over = True
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error)
                future.exception()  # whoever waits may have been cancelled, and it is nobody's fault then
