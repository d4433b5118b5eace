"""The process `env/<name>`: runs rollouts of one environment for the orchestrator over one websocket.

Messages are JSON objects with "op"; "rollout" is the orchestrator's id of the rollout. orchestrator -> worker: start
{split, index}, assistant {content, finish_reason, prompt_tokens, completion_tokens}, ended, cancel. worker ->
orchestrator: hello {counts}, reply {keep, messages, tools} (say `messages` behind the first `keep` ones), done
{reward, metrics, task}, failed {error}. The orchestrator has the tokenizer and the engines; this side has only text,
and code that may raise, hang or return nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import threading
from collections.abc import Sequence
from typing import Any

from aiohttp import WSMsgType, web

from prl.config.schema import EnvConfig
from prl.envs.loading import load_env
from prl.envs.protocol import ChatEnded, Environment, Message, Reply, Score, Task, Tool
from prl.runtime.child import ChildContext

MAX_STUCK_REWARDS = 8  # threads that never came back; beyond that the process starts afresh
MAX_MESSAGE_BYTES = 64 << 20


class RewardFailed(RuntimeError):
    """What the environment's reward raised, as text."""


class TooManyStuckRewards(RuntimeError):
    """Reward threads keep hanging; only a new process gets rid of them."""


def main(ctx: ChildContext) -> None:
    """Entry of `env/<name>`."""
    config = ctx.plan.config.env
    name = ctx.role.name.removeprefix("env/")
    source = config.mix[name]
    asyncio.run(EnvWorker(ctx, load_env(source.id, source.args), config).run())


class RemoteChat:
    """A `Chat` whose replies come from the orchestrator."""

    def __init__(self, worker: EnvWorker, rollout: str) -> None:
        self.messages: list[Message] = []
        self.worker, self.rollout = worker, rollout
        self.answer: asyncio.Future[Reply | None] | None = None
        self.turn = asyncio.Lock()  # an environment may ask for several replies at once

    async def reply(self, *messages: Message) -> str:
        async with self.turn:
            return (await self._ask(len(self.messages), list(messages), [])).content

    async def complete(self, messages: list[Message], tools: list[Tool] | None = None) -> Reply:
        async with self.turn:
            pairs = zip(self.messages, messages, strict=False)
            keep = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self.messages), len(messages)))
            return await self._ask(keep, messages[keep:], tools or [])

    async def _ask(self, keep: int, messages: list[Message], tools: list[Tool]) -> Reply:
        self.messages[keep:] = messages
        self.answer = asyncio.get_running_loop().create_future()
        asked = {"op": "reply", "rollout": self.rollout, "keep": keep, "messages": messages, "tools": tools}
        await self.worker.send(asked)
        reply = await self.answer
        if reply is None:
            raise ChatEnded
        self.messages.append({"role": "assistant", "content": reply.content})
        return reply


class EnvWorker:
    def __init__(self, ctx: ChildContext, env: Environment, config: EnvConfig) -> None:
        self.ctx, self.env, self.config = ctx, env, config
        self.tasks: dict[str, Sequence[Task]] = {"train": env.tasks("train"), "held_out": env.tasks("held_out")}
        self.chats: dict[str, RemoteChat] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.socket: web.WebSocketResponse | None = None
        self.stuck: list[threading.Thread] = []  # reward computations that are overdue

    async def run(self) -> None:
        app = web.Application()
        app.router.add_get("/ws", self.serve)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        assert self.ctx.listen_socket is not None
        await web.SockSite(runner, self.ctx.listen_socket).start()
        self.ctx.ready()
        while not self.ctx.stop_requested:
            self.ctx.beat()
            self.stuck = [thread for thread in self.stuck if thread.is_alive()]
            if len(self.stuck) >= MAX_STUCK_REWARDS:
                raise TooManyStuckRewards(f"{len(self.stuck)} rewards of {self.ctx.role.name} never returned")
            await asyncio.sleep(0.1)
        await runner.cleanup()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {self.ctx.token}":
            return web.Response(status=401, text="wrong or missing token")
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        self.socket = socket
        await self.send({"op": "hello", "counts": {split: len(tasks) for split, tasks in self.tasks.items()}})
        async for message in socket:
            if message.type == WSMsgType.TEXT:
                self.handle(json.loads(message.data))
        if self.socket is socket:  # not when a new connection has already taken over
            for task in self.running.values():
                task.cancel()
        return socket

    async def send(self, message: dict[str, Any]) -> None:
        if self.socket is not None and not self.socket.closed:
            with contextlib.suppress(ConnectionError):  # the orchestrator left; nobody waits for this rollout
                await self.socket.send_str(json.dumps(message))

    def handle(self, message: dict[str, Any]) -> None:
        rollout, op = message["rollout"], message["op"]
        if op == "start":
            task = self.tasks[message["split"]][message["index"]]
            self.running[rollout] = asyncio.create_task(self.run_rollout(rollout, task))
        elif op == "cancel":
            if rollout in self.running:
                self.running[rollout].cancel()
        elif rollout in self.chats:
            answer = self.chats[rollout].answer
            if answer is not None and not answer.done():
                answer.set_result(read_reply(message) if op == "assistant" else None)

    async def run_rollout(self, rollout: str, task: Task) -> None:
        """One rollout from prompt to reward; whatever goes wrong in the environment's code fails only this one."""
        chat = self.chats[rollout] = RemoteChat(self, rollout)
        score = None
        try:
            with contextlib.suppress(ChatEnded):
                score = await self.env.rollout(task, chat)
            if score is None:
                score = Score(await self.compute_reward(task, chat.messages))
            if not math.isfinite(score.reward):
                raise ValueError(f"the reward is {score.reward}")
            done = {"op": "done", "rollout": rollout, "task": task.id}
            await self.send({**done, "reward": score.reward, "metrics": score.metrics})
        except RewardFailed as error:
            await self.send({"op": "failed", "rollout": rollout, "error": str(error)})
        except Exception as error:
            await self.send({"op": "failed", "rollout": rollout, "error": f"{type(error).__name__}: {error}"})
        finally:
            self.chats.pop(rollout, None)
            self.running.pop(rollout, None)

    async def compute_reward(self, task: Task, messages: list[Message]) -> float:
        """The reward, computed in a thread of its own, at most reward_timeout_s long. Raises what the reward raised."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[float] = loop.create_future()

        def deliver(value: float, error: str) -> None:
            if not result.done():
                result.set_exception(RewardFailed(error)) if error else result.set_result(value)

        def compute() -> None:
            value, error = math.nan, ""
            try:
                value = float(self.env.reward(task, messages))
            except BaseException as caught:  # as text: SystemExit or StopIteration must not get into the event loop
                error = f"{type(caught).__name__}: {caught}"
            with contextlib.suppress(RuntimeError):  # the loop is gone: the process is stopping
                loop.call_soon_threadsafe(deliver, value, error)

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        try:
            return await asyncio.wait_for(result, self.config.reward_timeout_s)
        except TimeoutError:
            self.stuck.append(thread)
            raise TimeoutError(f"no reward after {self.config.reward_timeout_s} s") from None


def read_reply(message: dict[str, Any]) -> Reply:
    """The reply in an "assistant" message."""
    return Reply(**{field.name: message[field.name] for field in dataclasses.fields(Reply)})
