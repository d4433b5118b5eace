"""GET /inference/v1/generate, as a websocket: what POST does, for many requests over one connection."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from aiohttp import WSCloseCode, WSMsgType, web

from prl.inference.bounds import body_limit, parse_json
from prl.inference.reporting import report
from prl.inference.worker import EngineWorker
from prl.transport.frames import Message
from prl.transport.sampling_socket import FRAME, PIECE, parts_of, read_messages

Answer = Callable[[dict[str, Any]], Awaitable[Message]]  # body -> answer; raises as the POST route does
AT_ONCE = 4096  # requests of one connection that are under way, or whose answers have not gone out
WORDS_OF_CLOSE = 100  # characters; a frame that closes has room for 123 bytes
CLOSE_S = 0.5  # for a client to take its leave


def add_socket_route(app: web.Application, worker: EngineWorker, answer: Answer) -> None:
    open_now: set[Conversation] = set()

    async def converse(http: web.Request) -> web.StreamResponse:
        limit = body_limit(worker.engine.config.max_model_len) + FRAME
        socket = web.WebSocketResponse(max_msg_size=limit, compress=False, timeout=CLOSE_S)
        if not socket.can_prepare(http):
            raise web.HTTPMethodNotAllowed("GET", ["POST"])
        await socket.prepare(http)
        conversation = Conversation(socket, answer)
        open_now.add(conversation)
        try:
            await conversation.run()
        finally:
            open_now.discard(conversation)
        return socket

    async def end(_: web.Application) -> None:
        await asyncio.gather(*(one.end(WSCloseCode.GOING_AWAY) for one in open_now))

    app.on_shutdown.append(end)
    app.router.add_get("/inference/v1/generate", converse)


class Conversation:
    """One client's requests; they end with its connection.

    One task sends all answers: aiohttp has those that wait for a slow client wait for one future, and who is cancelled
    there takes the others along.
    """

    def __init__(self, socket: web.WebSocketResponse, answer: Answer) -> None:
        self.socket, self.answer = socket, answer
        self.tasks: dict[int, asyncio.Task[None]] = {}
        self.short: list[bytes] = []  # answers that go out together
        self.long: deque[Iterator[bytes]] = deque()  # and part by part
        self.unsent = 0
        self.something = asyncio.Event()  # to be sent
        self.sender = asyncio.create_task(self._send())

    async def run(self) -> None:
        try:
            async for message in self.socket:
                if message.type == WSMsgType.TEXT:
                    self._take(message.data)
        except ValueError as error:  # nobody knows which request it was
            await self.end(WSCloseCode.POLICY_VIOLATION, ascii(str(error))[:WORDS_OF_CLOSE].encode())
        finally:
            self._stop()

    async def end(self, code: int, reason: bytes = b"") -> None:
        """Hang up, also on a client that reads nothing."""
        self._stop()
        with contextlib.suppress(TimeoutError, ConnectionError):
            await asyncio.wait_for(self.socket.close(code=code, message=reason), CLOSE_S)

    def _stop(self) -> None:
        for task in (self.sender, *self.tasks.values()):
            task.cancel()

    def _take(self, text: str) -> None:
        for number, body in read_messages(parse_json(text)):
            task = self.tasks.get(number)
            if body is None:
                if task is not None:
                    task.cancel()
            elif task is not None:
                raise ValueError(f"request {number} is under way already")
            elif len(self.tasks) + self.unsent >= AT_ONCE:
                raise ValueError(f"more than {AT_ONCE} requests at once")
            else:
                task = self.tasks[number] = asyncio.create_task(self._carry_out(number, body))
                task.add_done_callback(partial(self._over, number))

    def _over(self, number: int, _: asyncio.Task[None]) -> None:
        del self.tasks[number]

    async def _carry_out(self, number: int, body: dict[str, Any]) -> None:
        try:
            status, answer = 200, await self.answer(body)
        except Exception as error:
            status, told = report(error, "/inference/v1/generate")
            answer = Message([memoryview(json.dumps(told).encode())])
        parts = parts_of(number, status, answer)
        if len(answer) <= PIECE:
            self.short.extend(parts)
        else:
            self.long.append(parts)
        self.unsent += 1
        self.something.set()

    async def _send(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client left
            while True:
                await self.something.wait()
                self.something.clear()
                while self.short or self.long:
                    short, self.short = self.short, []
                    if short:
                        await self.socket.send_bytes(b"".join(short))
                        self.unsent -= len(short)
                    if self.long and (part := next(self.long[0], None)) is not None:
                        await self.socket.send_bytes(part)
                    elif self.long:
                        self.long.popleft()
                        self.unsent -= 1
                    await asyncio.sleep(0)  # a socket that takes all at once would not let others in
