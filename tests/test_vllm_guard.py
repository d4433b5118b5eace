"""What stands before vLLM's application, before another one: bodies, bounds, and patience."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from prl.config import compose
from prl.inference.guard import Doors
from prl.planning.vllm_arguments import kept_parameters
from prl.transport.sources import WeightSource

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("httptools") is None, reason="vLLM's HTTP server is not installed"),
]

GENERATE = "/inference/v1/generate"
SOURCE = WeightSource("filesystem", "/run/weights", "/dev/shm/x", ("127.0.0.1",), 10.0)


class Reached:
    """The application behind the guard: what it got."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.bodies.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


async def ask(app: Any, path: str, pieces: list[bytes], key: bytes = b"client") -> int:
    """The status of the answer to a POST whose body comes in pieces."""
    left, statuses = list(pieces), []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: dict[str, Any]) -> None:
        statuses.extend([message["status"]] if "status" in message else [])

    headers = [(b"host", b"x"), (b"authorization", b"Bearer " + key)]
    await app({"type": "http", "method": "POST", "path": path, "headers": headers}, receive, send)
    return statuses[0]


def guarded(*overrides: str, restarts: int = 0) -> tuple[Any, Reached]:
    from prl.inference.vllm.guarding import Guard
    from prl.inference.vllm.server import starts_with_weights

    reached = Reached()
    config = compose(["inference=vllm", "warm_start=none", *overrides])
    has_weights = starts_with_weights(restarts, config)
    return Guard(reached, Doors((b"client",), (b"control",)), SOURCE, config, has_weights=has_weights), reached


def test_a_stranger_has_no_body_to_send() -> None:
    guard, reached = guarded()
    mebibyte = b"x" * (1 << 20)
    assert asyncio.run(ask(guard, "/health", [mebibyte] * 4, key=b"")) == 413
    assert not reached.bodies
    assert asyncio.run(ask(guard, "/health", [b""], key=b"")) == 200
    assert asyncio.run(ask(guard, "/update_weights", [mebibyte] * 4, key=b"control")) == 200


@pytest.mark.parametrize(
    ("overrides", "restarts"), [(["model=qwen3_0_6b", "inference.quantization=fp8_block"], 0), ([], 1)]
)
def test_nothing_is_generated_before_the_first_version(overrides: list[str], restarts: int) -> None:
    """Of an engine that begins with made-up weights, or with those of a version that has been trained past."""
    guard, _ = guarded(*overrides, restarts=restarts)
    assert asyncio.run(ask(guard, GENERATE, [b"{}"])) == 503
    assert asyncio.run(ask(guard, "/start_weight_update", [b"{}"], key=b"control")) == 200
    assert asyncio.run(ask(guard, "/v1/completions", [b"{}"])) == 503
    assert asyncio.run(ask(guard, "/finish_weight_update", [b"{}"], key=b"control")) == 200
    assert asyncio.run(ask(guard, GENERATE, [b"{}"])) == 200


@pytest.mark.parametrize("top_k", [128, 1008, 1009, 20_000])
def test_what_training_asks_for_goes_through(top_k: int) -> None:
    overrides = [f"inference.sampling.top_k={top_k}", "model=qwen3_0_6b"]
    guard, reached = guarded(*overrides)
    asked = kept_parameters(compose(["inference=vllm", "warm_start=none", *overrides]))
    assert asked is not None
    body = {"token_ids": [1], "sampling_params": {"top_k": top_k, **asked}}
    assert asyncio.run(ask(guard, GENERATE, [json.dumps(body).encode()])) == 200
    body["sampling_params"]["logprobs"] = max(1024, asked["logprobs"]) + 1
    assert asyncio.run(ask(guard, GENERATE, [json.dumps(body).encode()])) == 400
    assert len(reached.bodies) == 1


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[str, int]]:
    import uvicorn

    from prl.inference.vllm.guarding import TimedProtocol

    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(Reached(), http=TimedProtocol, ws="none", lifespan="off", log_level="warning")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0.01)
        yield listener.getsockname()
        server.should_exit = True
        await task


REQUEST = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"
CONNECTIONS = {
    "nothing": b"",
    "an empty line": b"\r\n",
    "half a head": b"GET /x HT",
    "an answer, then nothing": REQUEST,
    "an answer, then an empty line": REQUEST + b"\r\n",
    "an answer, then half a head": REQUEST + b"GET /x HT",
    "two answers, then an empty line": REQUEST * 2 + b"\r\n",
}


def test_no_connection_stays_without_a_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    from prl.inference.vllm import guarding

    monkeypatch.setattr(guarding, "HEAD_S", 1.0)

    async def closes(address: tuple[str, int], sent: bytes) -> bool:
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(sent.count(REQUEST)):
            writer.write(REQUEST)
            await reader.readuntil(b"\r\n\r\nok")
        writer.write(sent.replace(REQUEST, b""))
        try:
            async with asyncio.timeout(60):
                await reader.read()
        except TimeoutError:
            return False
        except ConnectionError:
            pass
        finally:
            writer.close()
        return True

    async def scenario() -> list[bool]:
        async with served() as address:
            return await asyncio.gather(*(closes(address, sent) for sent in CONNECTIONS.values()))

    assert dict(zip(CONNECTIONS, asyncio.run(scenario()), strict=True)) == dict.fromkeys(CONNECTIONS, True)


def test_a_long_answer_is_not_cut_short_by_the_time_for_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor that to a request which came while the one before was answered."""
    from prl.inference.vllm import guarding

    monkeypatch.setattr(guarding, "HEAD_S", 0.5)

    async def slowly(self: Reached, scope: Any, receive: Any, send: Any) -> None:
        await asyncio.sleep(1.0)
        await answer(self, scope, receive, send)

    answer = Reached.__call__
    monkeypatch.setattr(Reached, "__call__", slowly)

    async def scenario() -> bytes:
        async with served() as address:
            reader, writer = await asyncio.open_connection(*address)
            writer.write(REQUEST * 3)
            async with asyncio.timeout(60):
                got = b"".join([await reader.readuntil(b"\r\n\r\nok") for _ in range(3)])
            writer.close()
            return got

    assert asyncio.run(scenario()).count(b"200 OK") == 3
