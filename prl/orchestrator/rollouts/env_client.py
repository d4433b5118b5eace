"""The orchestrator's end of the websocket to one `env/<name>` process.

What comes from there was made by anybody's code, and is looked at here before anything is done with it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from prl.envs.checks import Nonsense, check_messages, check_metrics, check_reward, check_text, check_tools
from prl.envs.protocol import OUTCOMES, Message, Reply, Score, Tool
from prl.orchestrator.engines.turnstile import Turnstile
from prl.orchestrator.rollouts.rollout import EnvironmentGone, RolloutFailed
from prl.runtime.directory.files import parse_object

# (messages, how many of the earlier ones stay in front of them, tools) -> the next turn, None: there is none
Answer = Callable[[list[Message], int, list[Tool]], Awaitable[Reply | None]]
AT_ONCE = 16  # rollouts that go on in one turn of the event loop
GONE: dict[str, Any] = {"op": "gone"}  # in place of a worker's messages
log = logging.getLogger("prl.orchestrator")


class EnvClient:
    """Runs rollouts in the environment's process; reconnects when that process is restarted."""

    def __init__(self, name: str, url: str, key: str) -> None:
        self.name, self.url = name, url
        self.headers = {"Authorization": f"Bearer {key}"}
        self.counts: dict[str, int] = {}  # tasks per split
        self.socket: aiohttp.ClientWebSocketResponse | None = None
        self.connected = asyncio.Event()
        self.inbox: dict[str, asyncio.Queue[dict[str, Any]]] = {}
        self.ids = itertools.count()
        self.taking_up = Turnstile(AT_ONCE)

    async def serve(self) -> None:
        """Keep a connection open and hand messages to their rollouts; runs until cancelled."""
        async with aiohttp.ClientSession(headers=self.headers) as session:
            while True:
                try:
                    async with session.ws_connect(f"{self.url}/ws", max_msg_size=0) as socket:
                        self.socket = socket
                        async for message in socket:
                            if message.type == aiohttp.WSMsgType.TEXT:
                                self._receive(message.data)
                except (aiohttp.ClientError, OSError):
                    pass
                self.connected.clear()
                for queue in self.inbox.values():
                    queue.put_nowait(GONE)
                await asyncio.sleep(0.2)

    def _receive(self, text: str) -> None:
        try:
            message = parse_object(text) or {}
        except RecursionError:
            message = {}
        op, rollout = message.get("op"), message.get("rollout")
        counts = message.get("counts")
        if op == "hello" and isinstance(counts, dict) and all(type(n) is int for n in counts.values()):
            self.counts = counts
            self.connected.set()
        elif op in ("reply", "done", "failed") and isinstance(rollout, str):
            if queue := self.inbox.get(rollout):  # else it is over
                queue.put_nowait(message)
        else:
            log.warning("what env/%s sent is no message of a worker: %.200s", self.name, ascii(text))

    async def run(self, split: str, index: int, answer: Answer) -> tuple[str, Score]:
        """One rollout: `answer(messages, keep, tools)` is called for every reply wanted. Returns (task id, score).

        Raises RolloutFailed when the environment's code or process fails, and whatever `answer` raises.
        """
        await self.connected.wait()
        rollout = str(next(self.ids))
        queue = self.inbox[rollout] = asyncio.Queue()
        said = 0  # messages in the conversation
        finished = False
        try:
            await self._send({"op": "start", "rollout": rollout, "split": split, "index": index})
            while True:
                message = await queue.get()
                if message is GONE:
                    raise EnvironmentGone
                await self.taking_up.through()
                finished = message["op"] != "reply"
                try:
                    wanted = _read(message, said)
                except Nonsense as error:
                    raise RolloutFailed(f"the environment's process said: {error}") from error
                if not isinstance(wanted, _Wanted):
                    return wanted
                reply = await answer(wanted.messages, wanted.keep, wanted.tools)
                said = wanted.keep + len(wanted.messages) + (reply is not None)
                op = {"op": "ended"} if reply is None else {"op": "assistant", **dataclasses.asdict(reply)}
                await self._send({**op, "rollout": rollout})
        finally:
            del self.inbox[rollout]
            if not finished:
                await self._send({"op": "cancel", "rollout": rollout})

    async def _send(self, message: dict[str, Any]) -> None:
        socket = self.socket
        assert socket is not None
        try:
            await socket.send_str(json.dumps(message))
        except (aiohttp.ClientError, ConnectionError) as error:
            if socket is self.socket:  # known here before its reader knows: who tries again waits for the next one
                self.connected.clear()
            if message["op"] != "cancel":
                raise EnvironmentGone(f": {error}") from error


@dataclasses.dataclass(frozen=True)
class _Wanted:
    """A reply that the environment asks for."""

    messages: list[Message]
    keep: int
    tools: list[Tool]


def _read(message: dict[str, Any], said: int) -> _Wanted | tuple[str, Score]:
    """What a worker says of a rollout in which so many messages were said. Raises Nonsense, and RolloutFailed for
    "failed".
    """
    if message["op"] == "reply":
        keep = message.get("keep")
        if type(keep) is not int or not 0 <= keep <= said:
            raise Nonsense(f"keep is {keep!r:.60}, not a number of the {said} messages so far")
        return _Wanted(check_messages(message.get("messages")), keep, check_tools(message.get("tools")))
    if message["op"] == "done":
        score = Score(check_reward(message.get("reward")), check_metrics(message.get("metrics")))
        return check_text(message.get("task"), "task"), score
    error, outcome = check_text(message.get("error"), "error"), message.get("outcome")
    if outcome not in OUTCOMES or outcome == "policy":
        raise Nonsense(f"outcome is {outcome!r:.60}")
    raise RolloutFailed(error, outcome, check_text(message.get("trace"), "trace"))
