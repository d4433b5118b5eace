"""100,000 requests to one server: it holds no more afterwards than when it was warm.

pytest -m exhaustive -s tests/test_soak.py        # prints the table of README.md; SOAK_REQUESTS=5000 for a look
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import aiohttp
import psutil
import pytest
from fuzzing import Footprint
from runs import finish, start
from test_trust_control import announced_ports

REQUESTS = int(os.environ.get("SOAK_REQUESTS", "100000"))
WORKERS = 32
LOOKS = 10
MOST_MIB = (
    24.0  # between the first look, when all is warm, and the last: no more than the allocator's own ups and downs
)
GOOD = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2, "temperature": 1.0}}


async def one(session: aiohttp.ClientSession, url: str, number: int) -> int:
    """Good ones and bad ones, streams, and clients that hang up."""
    kind = number % 10
    if kind == 0:
        body = GOOD | {"sampling_params": {"temperature": 1e39}}
    elif kind == 1:
        body = {"token_ids": [number % 200] * 50, "cache_salt": f"s{number}", "sampling_params": {"max_tokens": 1}}
    else:
        body = GOOD | {"request_id": f"r{number}", "sampling_params": {"max_tokens": 2, "seed": number}}
    if kind == 2:
        message = {"messages": [{"role": "user", "content": f"{number}"}], "max_tokens": 2, "stream": True}
        async with session.post(f"{url}/v1/chat/completions", json=message) as response:
            await response.read()
            return response.status
    if kind == 3:
        try:
            async with asyncio.timeout(0.002), session.post(f"{url}/inference/v1/generate", json=body) as response:
                return response.status
        except TimeoutError:
            return 499
    async with session.post(f"{url}/inference/v1/generate", json=body) as response:
        await response.read()
        return response.status


async def soak(url: str, looks: list[tuple[int, dict[str, Footprint]]], root: psutil.Process) -> dict[int, int]:
    statuses: dict[int, int] = {}
    numbers = iter(range(REQUESTS))

    async def work(session: aiohttp.ClientSession) -> None:
        for number in numbers:
            status = await one(session, url, number)
            statuses[status] = statuses.get(status, 0) + 1
            if (number + 1) % (REQUESTS // LOOKS) == 0:
                looks.append((number + 1, footprints(root)))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=WORKERS)) as session:
        await asyncio.gather(*(work(session) for _ in range(WORKERS)))
    return statuses


def footprints(root: psutil.Process) -> dict[str, Footprint]:
    found = {"root": Footprint.of(root.pid)}
    for child in root.children():
        words = child.cmdline()
        if "prl.runtime.process.child" in words:
            found[words[-1]] = Footprint.of(child.pid)
    return found


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
def test_memory_and_descriptors_stay_flat(tmp_path: Path) -> None:
    """Engine and router of `python -m prl.inference`, and their root."""
    overrides = ["inference.router.type=builtin", f"cache_dir={tmp_path}/cache", f"output_dir={tmp_path}/run"]
    process = start(overrides, tmp_path, "prl.inference")
    root = psutil.Process(process.pid)
    looks: list[tuple[int, dict[str, Footprint]]] = []
    try:
        (port,), _ = announced_ports(process)
        statuses = asyncio.run(soak(f"http://127.0.0.1:{port}", looks, root))
    finally:
        process.send_signal(signal.SIGTERM)
        assert finish(process, 60).code == 143
    for number, found in looks:
        print(number, *(f"{name}: {f.rss_mib:.1f} MiB, {f.fds} fds, {f.threads} threads;" for name, f in found.items()))
    print(statuses)
    assert statuses[200] > REQUESTS * 0.7
    assert statuses[400] == REQUESTS / 10
    assert set(statuses) <= {200, 400, 499}
    (_, first), (_, last) = looks[0], looks[-1]
    for name in ("root", "router", "inference/0"):
        assert last[name].rss_mib - first[name].rss_mib < MOST_MIB, name
        assert last[name].fds <= first[name].fds + WORKERS, name
        assert last[name].threads <= first[name].threads + 2, name
