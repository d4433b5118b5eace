"""An environment's process that is started again: whoever had sent something to the old one waits for the new one."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest

from prl.orchestrator.rollouts.env_client import EnvClient
from prl.orchestrator.rollouts.rollout import EnvironmentGone

pytestmark = pytest.mark.slow

WORKER = """
import json
import sys

from aiohttp import web


async def talk(request):
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.send_str(json.dumps({"op": "hello", "counts": {"train": 5}}))
    async for message in socket:
        asked = json.loads(message.data)
        if asked["op"] == "start":
            done = {"op": "done", "rollout": asked["rollout"], "task": "t", "reward": 1.0, "metrics": {}}
            await socket.send_str(json.dumps(done))
    return socket


app = web.Application()
app.router.add_get("/ws", talk)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)
"""


def test_rollouts_begun_in_the_moment_of_its_death_need_one_more_try_each():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    def worker():
        return subprocess.Popen([sys.executable, "-c", WORKER, str(port)])

    async def scenario():
        process = worker()
        client = EnvClient("x", f"http://127.0.0.1:{port}", "key")
        serving = asyncio.create_task(client.serve())
        await asyncio.wait_for(client.connected.wait(), 120)

        async def rollout():
            try:
                return await client.run("train", 0, None)
            except EnvironmentGone:
                return await client.run("train", 0, None)

        process.kill()
        process.wait()  # nothing else runs here meanwhile: the connection is not known to be closed
        process = worker()
        try:
            ended = await asyncio.wait_for(asyncio.gather(*(rollout() for _ in range(8))), 120)
            assert [task for task, _ in ended] == ["t"] * 8
        finally:
            serving.cancel()
            process.kill()
            process.wait()

    asyncio.run(scenario())
