"""The orchestrator's end of the websocket to one `env/<name>` process."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from prl.envs.protocol import Message, Reply, Score, Tool

# (messages, how many of the earlier ones stay in front of them, tools) -> the next turn, None: there is none
Answer = Callable[[list[Message], int, list[Tool]], Awaitable[Reply | None]]


class RolloutFailed(Exception):
    """The environment's code failed this rollout; the message says how."""


class EnvClient:
    """Runs rollouts in the environment's process; reconnects when that process is restarted."""

    def __init__(self, name: str, url: str, token: str) -> None:
        self.name, self.url = name, url
        self.headers = {"Authorization": f"Bearer {token}"}
        self.counts: dict[str, int] = {}  # tasks per split
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.connected = asyncio.Event()
        self.inbox: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.ids = itertools.count()

    async def serve(self) -> None:
        """Keep a connection open and hand messages to their rollouts; runs until cancelled."""
        async with aiohttp.ClientSession(headers=self.headers) as session:
            while True:
                try:
                    async with session.ws_connect(f"{self.url}/ws", max_msg_size=0) as socket:
                        self.socket = socket
                        async for message in socket:
                            self._receive(json.loads(message.data))
                except (aiohttp.ClientError, ConnectionError):
                    pass
                self.connected.clear()
                for queue in self.inbox.values():
                    queue.put_nowait({"op": "failed", "error": "the environment's process went away"})
                await asyncio.sleep(0.2)

    def _receive(self, message: dict[str, Any]) -> None:
        if message["op"] == "hello":
            self.counts = message["counts"]
            self.connected.set()
        elif queue := self.inbox.get(message["rollout"]):
            queue.put_nowait(message)

    async def run(self, split: str, index: int, answer: Answer) -> tuple[str, Score]:
        """One rollout: `answer(messages, keep, tools)` is called for every reply wanted. Returns (task id, score).

        Raises RolloutFailed when the environment's code fails, and whatever `answer` raises.
        """
        await self.connected.wait()
        rollout = str(next(self.ids))
        queue = self.inbox[rollout] = asyncio.Queue()
        finished = False
        try:
            await self._send({"op": "start", "rollout": rollout, "split": split, "index": index})
            while True:
                message = await queue.get()
                if message["op"] == "reply":
                    reply = await answer(message["messages"], message["keep"], message["tools"])
                    op = {"op": "ended"} if reply is None else {"op": "assistant", **dataclasses.asdict(reply)}
                    await self._send({**op, "rollout": rollout})
                    continue
                finished = True
                if message["op"] == "failed":
                    raise RolloutFailed(message["error"])
                return message["task"], Score(message["reward"], message["metrics"])
        finally:
            del self.inbox[rollout]
            if not finished:
                await self._send({"op": "cancel", "rollout": rollout})

    async def _send(self, message: dict[str, Any]) -> None:
        assert self.socket is not None
        try:
            await self.socket.send_str(json.dumps(message))
        except (aiohttp.ClientError, ConnectionError) as error:
            if message["op"] != "cancel":
                raise RolloutFailed(f"the environment's process went away: {error}") from error
