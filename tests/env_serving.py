"""The worker of an environment in the test's process, and the orchestrator's client of it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

from prl.config.schema import EnvConfig
from prl.envs.protocol import Reply
from prl.envs.worker import EnvWorker
from prl.orchestrator.rollouts.env_client import EnvClient
from prl.runtime.process.keys import RunKeys


def said(text, finish_reason="stop"):
    """A reply, a token to each character."""
    return Reply(text, finish_reason, prompt_tokens=1, completion_tokens=len(text))


class Context:
    """What a worker needs of a ChildContext."""

    def __init__(self):
        self.listen_socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listen_socket.getsockname()[1]}"
        self.keys, self.role, self.stop_requested = RunKeys(env="secret"), SimpleNamespace(name="env/toy"), False

    def ready(self): ...
    def beat(self): ...


@contextlib.asynccontextmanager
async def serving(env, reward_timeout_s=10.0):
    """(worker, connected client, the worker's main task)"""
    ctx = Context()
    worker = EnvWorker(ctx, env, EnvConfig(reward_timeout_s=reward_timeout_s))
    main = asyncio.create_task(worker.run())
    client = EnvClient("toy", ctx.url, ctx.keys.env)
    serve = asyncio.create_task(client.serve())
    try:
        await asyncio.wait_for(client.connected.wait(), 10)
        yield worker, client, main
    finally:
        serve.cancel()
        ctx.stop_requested = True
        await asyncio.wait([main, serve])
