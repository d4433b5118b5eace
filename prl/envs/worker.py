"""The process `env/<name>`: runs rollouts of one environment for the orchestrator over one websocket.

Messages are JSON objects with "op"; "rollout" is the orchestrator's id of the rollout. orchestrator -> worker: start
{split, index}, assistant {content, finish_reason, prompt_tokens, completion_tokens}, ended, cancel. worker ->
orchestrator: hello {counts}, reply {keep, messages, tools} (say `messages` behind the first `keep` ones), done
{reward, metrics, task}, failed {outcome, error, trace}. The orchestrator has the tokenizer and the engines; this side
has only text, and code that may raise, hang or return nonsense.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import selectors
import threading
import traceback
from collections.abc import Sequence
from typing import Any

from aiohttp import WSMsgType, web

from prl.config.schema import EnvConfig
from prl.envs.checks import Nonsense, check_messages, check_metrics, check_reward, check_task, check_tasks, check_tools
from prl.envs.loading import load_env, told_with_keys
from prl.envs.protocol import ChatEnded, Environment, GraderFailed, Message, Outcome, Reply, Score, Task, Tool
from prl.runtime.process.child import ChildContext
from prl.runtime.process.keys import bears
from prl.transport.serving import start_serving

MAX_STUCK_REWARDS = 8  # threads that never came back; beyond that the process starts afresh
MAX_MESSAGE_BYTES = 64 << 20
MAX_ERROR_CHARS, MAX_TRACE_CHARS = 2000, 8000  # of what is told about a rollout that failed
SPLITS = ("train", "held_out")
TICK_S, WATCH_S = 0.1, 0.5  # of the event loop, and of the thread that looks whether it still turns
log = logging.getLogger("prl.envs")


class RewardFailed(GraderFailed):
    """What the environment's reward raised, as text: SystemExit or StopIteration must not get into the event loop."""

    def __init__(self, error: str, trace: str) -> None:
        super().__init__(error)
        self.trace = trace


class EnvironmentBlocked(RuntimeError):
    """Code of a rollout has held the event loop for longer than a rollout may take: all rollouts are late with it."""


class TooManyStuckRewards(RuntimeError):
    """Reward threads keep hanging; only a new process gets rid of them."""


def main(ctx: ChildContext) -> None:
    """Entry of `env/<name>`."""
    config = ctx.plan.config.env
    name = ctx.role.name.removeprefix("env/")
    source = config.mix[name]
    with told_with_keys(f"env.mix.{name}.id", f"env.mix.{name}.args"):
        worker = EnvWorker(ctx, load_env(source.id, source.args), config)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(OwnSelector())) as runner:
        runner.run(worker.run())


class OwnSelector(selectors.DefaultSelector):
    """What an event loop waits with, and only in the process that has made it."""

    def __init__(self) -> None:
        super().__init__()
        self.pid = os.getpid()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        end_copy_of(self.pid)
        return super().select(timeout)


def end_copy_of(pid: int) -> None:
    """End this process if a rollout's os.fork() has made it, before it answers on the connection of the original."""
    if os.getpid() != pid:
        os._exit(0)


class RemoteChat:
    """A `Chat` whose replies come from the orchestrator."""

    def __init__(self, worker: EnvWorker, rollout: str) -> None:
        self.messages: list[Message] = []
        self.worker, self.rollout = worker, rollout
        self.answer: asyncio.Future[Reply | None] | None = None
        self.turn = asyncio.Lock()  # an environment may ask for several replies at once

    async def reply(self, *messages: Message) -> str:
        async with self.turn:
            return (await self._ask(len(self.messages), check_messages(messages), [])).content

    async def complete(self, messages: list[Message], tools: list[Tool] | None = None) -> Reply:
        messages, tools = check_messages(messages), check_tools(tools or [])
        async with self.turn:
            pairs = zip(self.messages, messages, strict=False)
            keep = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(self.messages), len(messages)))
            return await self._ask(keep, messages[keep:], tools)

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
        name = ctx.role.name.removeprefix("env/")
        self.tasks: dict[str, Sequence[Task]] = {
            "train": check_tasks(name, "train", env.tasks("train")),
            "held_out": check_tasks(name, "held_out", env.tasks("held_out")),
        }
        self.chats: dict[str, RemoteChat] = {}
        self.running: dict[str, asyncio.Task[None]] = {}
        self.socket: web.WebSocketResponse | None = None
        self.stuck: list[threading.Thread] = []  # reward computations that are overdue
        self.ticks = 0
        self.pid = os.getpid()

    async def run(self) -> None:
        app = web.Application()
        app.router.add_get("/ws", self.serve)
        assert self.ctx.listen_socket is not None
        runner = await start_serving(app, self.ctx.listen_socket)
        self.ctx.ready()
        over = threading.Event()
        threading.Thread(target=self._watch_the_loop, args=(over,), daemon=True).start()
        try:
            while not self.ctx.stop_requested:
                self.ctx.beat()
                self.ticks += 1
                self.stuck = [thread for thread in self.stuck if thread.is_alive()]
                if len(self.stuck) >= MAX_STUCK_REWARDS:
                    raise TooManyStuckRewards(f"{len(self.stuck)} rewards of {self.ctx.role.name} never returned")
                await asyncio.sleep(TICK_S)
        finally:
            over.set()
        await runner.cleanup()

    def _watch_the_loop(self, over: threading.Event) -> None:
        """End the process once the loop has stood still for longer than a rollout may take: the next one is free."""
        limit_s = self.config.rollout_timeout_s
        seen, still_s = -1, 0.0
        while still_s <= limit_s:
            if over.wait(WATCH_S):
                return
            still_s = still_s + WATCH_S if self.ticks == seen else 0.0  # what a halted process sleeps does not count
            seen = self.ticks
        blocked = f"a rollout's code blocked {self.ctx.role.name} for more than env.rollout_timeout_s={limit_s:g} s"
        self.ctx.fail(EnvironmentBlocked(f"{blocked}; where, the stacks in its log say"))

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if not bears(request.headers.get("Authorization", ""), [self.ctx.keys.env.encode()]):
            return web.Response(status=401, text="wrong or missing key")
        socket = web.WebSocketResponse(max_msg_size=MAX_MESSAGE_BYTES)
        await socket.prepare(request)
        self.socket = socket
        await self.send({"op": "hello", "counts": {split: len(tasks) for split, tasks in self.tasks.items()}})
        async for message in socket:
            if message.type == WSMsgType.TEXT and (asked := read_message(message.data)) is not None:
                self.handle(asked)
        if self.socket is socket:  # not when a new connection has already taken over
            for task in self.running.values():
                task.cancel()
        return socket

    async def send(self, message: dict[str, Any]) -> None:
        end_copy_of(self.pid)
        if self.socket is not None and not self.socket.closed:
            with contextlib.suppress(ConnectionError):  # the orchestrator left; nobody waits for this rollout
                await self.socket.send_str(json.dumps(message))

    def handle(self, message: dict[str, Any]) -> None:
        rollout, op = message["rollout"], message["op"]
        if op == "start":
            if rollout not in self.running:
                self.running[rollout] = asyncio.create_task(
                    self.run_rollout(rollout, message["split"], message["index"])
                )
        elif op == "cancel":
            if rollout in self.running:
                self.running[rollout].cancel()
        elif rollout in self.chats:
            answer = self.chats[rollout].answer
            if answer is not None and not answer.done():
                answer.set_result(read_reply(message) if op == "assistant" else None)

    async def run_rollout(self, rollout: str, split: str, index: int) -> None:
        """One rollout from prompt to reward; whatever goes wrong in the environment's code fails only this one."""
        try:
            task, score = await self.converse(rollout, split, index)
            said = {"op": "done", "task": task.id, "reward": score.reward, "metrics": score.metrics}
        except GraderFailed as error:
            said = failed("grader", error)
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            said = failed("environment", error)
        except asyncio.CancelledError as error:
            if (current := asyncio.current_task()) is not None and current.cancelling():
                raise  # by the orchestrator, who knows
            said = failed("environment", error)  # it cancelled itself
        finally:
            self.chats.pop(rollout, None)
            self.running.pop(rollout, None)
        await self.send({**said, "rollout": rollout})

    async def converse(self, rollout: str, split: str, index: int) -> tuple[Task, Score]:
        """The task and how it went, checked. Raises whatever is wrong."""
        tasks = self.tasks[split]
        if index >= len(tasks):
            raise Nonsense(f"there are {len(tasks)} tasks in {split}, and no task {index}")
        task = check_task(tasks[index])
        chat = self.chats[rollout] = RemoteChat(self, rollout)
        score = None
        with contextlib.suppress(ChatEnded):
            score = await self.env.rollout(task, chat)
        if score is None:
            return task, Score(await self.compute_reward(task, chat.messages))
        if not isinstance(score, Score):
            raise Nonsense(f"rollout() returned a {type(score).__name__}, neither a Score nor None")
        return task, Score(_graded(score.reward), check_metrics(score.metrics))

    async def compute_reward(self, task: Task, messages: list[Message]) -> float:
        """The reward, computed in a thread of its own, at most reward_timeout_s long. Raises what the reward raised."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def deliver(value: Any, error: RewardFailed | None) -> None:
            if not result.done():
                result.set_result(value) if error is None else result.set_exception(error)

        def compute() -> None:
            value, error = None, None
            try:
                value = self.env.reward(task, messages)
            except BaseException as caught:
                error = RewardFailed(describe(caught), trace_of(caught))
            with contextlib.suppress(RuntimeError):  # the loop is gone: the process is stopping
                loop.call_soon_threadsafe(deliver, value, error)

        thread = threading.Thread(target=compute, daemon=True)
        thread.start()
        try:
            return _graded(await asyncio.wait_for(result, self.config.reward_timeout_s))
        except TimeoutError:
            self.stuck.append(thread)
            raise GraderFailed(f"no reward after {self.config.reward_timeout_s} s") from None


def _graded(reward: Any) -> float:
    try:
        return check_reward(reward)
    except Nonsense as error:
        raise GraderFailed(str(error)) from None


def failed(outcome: Outcome, error: BaseException) -> dict[str, Any]:
    """What the orchestrator is told about a rollout that came to nothing."""
    if isinstance(error, RewardFailed):
        return {"op": "failed", "outcome": outcome, "error": str(error), "trace": error.trace}
    text = str(error) if isinstance(error, GraderFailed | Nonsense) else describe(error)
    return {"op": "failed", "outcome": outcome, "error": _printable(text)[:MAX_ERROR_CHARS], "trace": trace_of(error)}


def describe(error: BaseException) -> str:
    """An exception in a line, whatever its own code does."""
    try:
        text = f"{type(error).__name__}: {error}"
    except Exception:
        text = f"{type(error).__name__}, which cannot say what is wrong"
    return _printable(text)[:MAX_ERROR_CHARS]


def trace_of(error: BaseException) -> str:
    """The end of an exception's traceback."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = "".join(traceback.format_tb(error.__traceback__))
    return _printable(text)[-MAX_TRACE_CHARS:]


def _printable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


FIELDS: dict[str, dict[str, type]] = {  # of each message from the orchestrator
    "start": {"split": str, "index": int},
    "assistant": {"content": str, "finish_reason": str, "prompt_tokens": int, "completion_tokens": int},
    "ended": {},
    "cancel": {},
}


def read_message(text: str) -> dict[str, Any] | None:
    """What the orchestrator says; anything that it never says is let pass, with a word in the log."""
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(text)
        if isinstance(message, dict) and isinstance(message.get("rollout"), str):
            fields = FIELDS.get(str(message.get("op")))
            typed = fields is not None and all(type(message.get(name)) is kind for name, kind in fields.items())
            if typed and (message["op"] != "start" or (message["split"] in SPLITS and message["index"] >= 0)):
                return message
    log.warning("what came is no message of an orchestrator: %.200s", text)
    return None


def read_reply(message: dict[str, Any]) -> Reply:
    """The reply in an "assistant" message."""
    return Reply(**{field.name: message[field.name] for field in dataclasses.fields(Reply)})
