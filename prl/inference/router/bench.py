"""`python -m prl.inference.router.bench overhead|prefix`: what the routers cost, and what following prefixes brings.

overhead    requests/s and latency with upstreams that answer at once: direct, built-in router, vllm-router if installed
prefix      share of prompt tokens found cached by two real built-in engines in conversations of several turns
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
from aiohttp import web

from prl.config import compose
from prl.config.console import shield_console
from prl.config.schema import RouterConfig
from prl.inference.guard import Doors
from prl.inference.router import vllm_router
from prl.inference.router.proxy import Router
from prl.runtime.process.python_path import python_command, python_path

ROUTE = "/inference/v1/generate"
ANSWER = {"choices": [{"token_ids": list(range(64)), "finish_reason": "length"}]}
START_TIMEOUT_S = 120.0
WARMUP_S, MEASURED_S = 1.0, 4.0
ENGINE_BLOCK = 8  # tokens; of the built-in engine


def main() -> None:
    shield_console()
    parser = argparse.ArgumentParser(prog="prl router bench", description=__doc__)
    parser.add_argument("what", choices=["overhead", "prefix"])
    what = parser.parse_args().what
    asyncio.run(measure_overhead() if what == "overhead" else measure_prefixes())


# --- overhead ---------------------------------------------------------------------------------------------------------


async def measure_overhead() -> None:
    """Upstreams, router and this client are a process each."""
    with ExitStack() as stack:
        upstreams = [stack.enter_context(in_process(_upstream))[0] for _ in range(2)]
        ways: dict[str, tuple[list[str], int | None]] = {"direct": (upstreams, None)}
        url, pid = stack.enter_context(in_process(_builtin, upstreams))
        ways["builtin"] = ([url], pid)
        if vllm_router.is_installed():
            url, pid = stack.enter_context(_vllm_router(upstreams))
            ways["vllm_router"] = ([url], pid)
        for url in [url for urls, _ in ways.values() for url in urls]:
            await until_healthy(url)
        for prompt in (64, 4096):
            for clients in (1, 32):
                for way, (urls, router) in ways.items():
                    row = await _load(urls, clients, prompt, router)
                    print(f"{way:12} prompt {prompt:5} clients {clients:3}: {row}", flush=True)


async def _load(urls: list[str], clients: int, prompt: int, pid: int | None) -> str:
    """Closed loop of so many clients, taking turns over the URLs. `pid`: the router's, for its CPU time per request,
    which tells its cost on a busy machine, too.
    """
    latencies: list[float] = []
    before, number_asked = cpu_s(pid), 0
    start = time.perf_counter() + WARMUP_S
    end = start + MEASURED_S

    async def ask(session: aiohttp.ClientSession, number: int) -> None:
        nonlocal number_asked
        draw = random.Random(number)
        while (begun := time.perf_counter()) < end:
            body = {"token_ids": [draw.randrange(1000) for _ in range(prompt)], "sampling_params": {"max_tokens": 64}}
            begun = time.perf_counter()
            async with session.post(urls[number % len(urls)] + ROUTE, json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
            number_asked += 1
            if begun >= start:
                latencies.append(time.perf_counter() - begun)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(ask(session, number) for number in range(clients)))
    cuts = statistics.quantiles(latencies, n=100)
    spent = 1e3 * (cpu_s(pid) - before) / number_asked
    speed = f"{len(latencies) / MEASURED_S:7.0f} requests/s"
    return f"{speed}  p50 {1e3 * cuts[49]:7.2f} ms  p99 {1e3 * cuts[98]:7.2f} ms  router CPU {spent:5.2f} ms/request"


def cpu_s(pid: int | None) -> float:
    """CPU seconds of a process so far (Linux), 0 for None."""
    if pid is None:
        return 0.0
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _upstream(listening: socket.socket) -> None:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(ANSWER)

    app = web.Application(client_max_size=1 << 30)
    app.router.add_post(ROUTE, answer)
    app.router.add_get("/health", answer)
    web.run_app(app, sock=listening, access_log=None, print=None, handle_signals=False)


def _builtin(listening: socket.socket, upstreams: list[str]) -> None:
    app = Router(RouterConfig(), {str(i): url for i, url in enumerate(upstreams)}, "key", Doors(None)).app()
    web.run_app(app, sock=listening, access_log=None, print=None, handle_signals=False, handler_cancellation=True)


@contextmanager
def in_process(serve: object, *arguments: object) -> Iterator[tuple[str, int]]:
    """URL and process id of a server."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listening:
        process = multiprocessing.get_context("fork").Process(target=serve, args=(listening, *arguments), daemon=True)  # type: ignore[arg-type]
        process.start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    assert process.pid is not None
    try:
        yield url, process.pid
    finally:
        process.kill()
        process.join()


@contextmanager
def _vllm_router(upstreams: list[str]) -> Iterator[tuple[str, int]]:
    config = compose(["inference.router.type=vllm_router"])
    port = vllm_router.free_port()
    arguments = vllm_router.command(config, "127.0.0.1", port, vllm_router.free_port(), upstreams)
    with subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.kill()


async def until_healthy(url: str) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    async with aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} is not healthy after {START_TIMEOUT_S} s")
            await asyncio.sleep(0.1)


# --- prefixes ---------------------------------------------------------------------------------------------------------


async def measure_prefixes() -> None:
    """Same conversations, two policies."""
    types = ["builtin", *(["vllm_router"] if vllm_router.is_installed() else [])]
    for kind in types:
        for policy in ("cache_aware", "round_robin"):
            with tempfile.TemporaryDirectory() as directory, _engines(kind, policy, Path(directory)) as url:
                print(f"{kind:12} {policy:12}: {await _converse(url)}", flush=True)


@contextmanager
def _engines(kind: str, policy: str, directory: Path) -> Iterator[str]:
    """Two built-in engines behind a router; its URL."""
    arguments = [f"inference.router.type={kind}", f"inference.router.policy={policy}", f"output_dir={directory}/run"]
    arguments += ["deployment.num_infer_gpus=2", "deployment.device=cpu", "debug.num_threads=1"]
    arguments += ["inference.api_key_var=PRL_BENCH_KEY", "inference.max_model_len=1024", "logging.progress=plain"]
    environment = {**os.environ, "PYTHONPATH": python_path(), "PRL_BENCH_KEY": "bench"}
    command = python_command("prl.inference", *arguments)
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            said = next(line for line in process.stdout if " at http://" in line)
            yield said.split(" at ")[1].split(";")[0]
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


async def _converse(url: str, conversations: int = 24, turns: int = 6, grow: int = 64) -> str:
    """All conversations at once. A turn adds `grow` tokens, 16 of them the engine's own."""
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer bench"}) as session:

        async def talk(number: int) -> None:
            draw = random.Random(number)
            ids = list(range(64))  # a system prompt that all share
            for turn in range(turns):
                ids += [draw.randrange(256) for _ in range(grow - 16)]
                await asyncio.sleep(draw.random() * 0.2)  # what an environment takes
                sampling = {"max_tokens": 16, "ignore_eos": True, "seed": number}
                body = {"token_ids": ids, "sampling_params": sampling, "request_id": f"{number}-{turn}"}
                async with session.post(url + ROUTE, json=body) as response:
                    assert response.status == 200, await response.text()
                    ids += (await response.json())["choices"][0]["token_ids"]

        started = time.perf_counter()
        await asyncio.gather(*(talk(number) for number in range(conversations)))
        took = time.perf_counter() - started
        async with session.get(f"{url}/workers") as response:
            engines = [worker["url"] for worker in (await response.json())["workers"]]
        texts = []
        for engine in engines:
            async with session.get(f"{engine}/metrics") as response:
                texts.append(await response.text())
    queries, hits = (_total(texts, f"prefix_cache_{name}_total") for name in ("queries", "hits"))
    requests = [int(_total([text], "request_success_total")) for text in texts]
    return f"{hits / queries:.3f} of {queries:.0f} prompt tokens cached, requests {requests}, {took:.1f} s"


def _total(texts: list[str], name: str) -> float:
    return sum(float(value) for text in texts for value in re.findall(rf"^vllm:{name}\{{.*\}} (\S+)$", text, re.M))


if __name__ == "__main__":
    main()
