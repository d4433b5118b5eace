"""Versions that come near an engine while it still serves the one before."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from weight_updates import published

from prl.inference import weight_routes
from prl.inference.vllm import prefetching
from prl.inference.vllm.prefetching import Prefetcher
from prl.inference.weight_routes import WeightUpdate
from prl.runtime.process import free_memory
from prl.transport.prefetch import Prefetched, prefetch
from prl.transport.shelves import Keeper
from prl.transport.sources import WeightSource
from prl.transport.weights import Publisher, stage
from prl.transport.weights_files import FilesystemPublisher
from prl.transport.weights_shared import SharedMemoryPublisher
from prl.transport.weights_tcp import TcpPublisher

NAMED = [
    ("matrix", torch.arange(7000, dtype=torch.float32).view(100, 70)),
    ("vector", torch.arange(9, dtype=torch.float32).bfloat16()),
    ("empty", torch.empty(0, 4)),
    ("large", torch.arange(6_000_000, dtype=torch.float32).view(2000, 3000)),  # several parcels
]


def publisher_of(kind: str, where: Path) -> Publisher | Keeper:
    if kind == "filesystem":
        return FilesystemPublisher(where / "weights", 2)
    return TcpPublisher("127.0.0.1", 10.0) if kind == "tcp" else SharedMemoryPublisher(where / "segment")


def loaded(update_info: dict[str, Any]) -> dict[str, Tensor]:
    return {name: tensor.clone() for chunk in stage(update_info, verify=True) for name, tensor in chunk}


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def none_is_left(before: int) -> bool:
    """Files that were open before, at most: the trainer, in this process, takes its time to hang up, too."""
    until = time.monotonic() + 5
    while (more := open_files() > before) and time.monotonic() < until:
        time.sleep(0.01)
    return not more


@pytest.mark.parametrize("kind", ["filesystem", "shared_memory", "tcp"])
def test_what_came_near_is_what_was_published(kind: str, tmp_path: Path) -> None:
    publisher = publisher_of(kind, tmp_path)
    version = prefetch(published(publisher, 3, NAMED), verify=True)
    got = loaded(version.amended())
    assert {*got} == {name for name, _ in NAMED}
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in NAMED)
    version.close()


@pytest.fixture
def held(tmp_path: Path) -> Prefetched:
    """By tcp, and the trainer has it no more."""
    publisher = TcpPublisher("127.0.0.1", 10.0)
    version = prefetch(published(publisher, 3, NAMED), verify=True)
    publisher.acknowledge()
    return version


def test_other_processes_of_the_host_read_the_same_copy(held: Prefetched) -> None:
    code = """
import json, sys
from prl.transport.weights import stage
print([[name, tensor.double().sum().item()] for chunk in stage(json.loads(sys.argv[1])) for name, tensor in chunk])
"""
    done = subprocess.run([sys.executable, "-c", code, json.dumps(held.amended())], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.replace("'", '"')) == [[name, tensor.double().sum().item()] for name, tensor in NAMED]


ELSEWHERE = [{"host": "another"}, {"token": "0" * 32}, {"path": ""}, {"path": "/proc/1/fd/9999"},
             {"path": "/proc/self/fd/0"}]  # fmt: skip


@pytest.mark.parametrize("changed", ELSEWHERE)
def test_a_copy_that_is_not_here_is_fetched_instead(held: Prefetched, changed: dict[str, str]) -> None:
    assert loaded(held.amended())
    with pytest.raises(OSError, match="from the trainer at "):  # which has it no more
        stage(held.update_info | {"near": held.said | changed})
    held.close()
    with pytest.raises(OSError, match="from the trainer at "):
        stage(held.amended())


def test_who_has_it_mapped_keeps_it(held: Prefetched) -> None:
    before = open_files()
    staged = stage(held.amended())
    held.close()
    assert none_is_left(before)
    assert torch.equal({name: tensor for ((name, tensor),) in staged}["large"], NAMED[3][1])


@pytest.mark.parametrize("kind", ["filesystem", "shared_memory", "tcp"])
def test_damage_is_seen_when_it_comes_near_and_nothing_is_left(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher = publisher_of(kind, tmp_path)
    info = published(publisher, 3, NAMED)
    if kind == "tcp":
        assert isinstance(publisher, TcpPublisher)
        ((_, data),) = publisher.server.versions.values()
        data[-1] ^= 1
    else:
        path = next((tmp_path / "weights/step_3").glob("*.safetensors")) if kind == "filesystem" else (
            tmp_path / "segment-3-0")  # fmt: skip
        with path.open("r+b") as file:
            file.seek(-64, os.SEEK_END)
            file.write(b"\1" * 64)
    before = open_files()
    with pytest.raises(ValueError, match="damaged"):
        prefetch(info, verify=True)
    assert none_is_left(before)
    prefetch(info, verify=False).close()


def test_a_copy_that_has_no_room_is_not_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9999999 kB\nMemAvailable: 20000 kB\n")
    monkeypatch.setattr(free_memory, "MEMINFO", tmp_path / "meminfo")
    info, before = published(TcpPublisher("127.0.0.1", 10.0), 3, NAMED), open_files()
    with pytest.raises(MemoryError, match="bytes, and 20480000 are available"):
        prefetch(info, verify=True)
    assert none_is_left(before)
    assert loaded(info)


def test_engines_take_from_memory_of_processes_only(held: Prefetched) -> None:
    source = WeightSource("tcp", "", "", ("127.0.0.1",), 10.0)
    assert source.check(held.amended()) == held.amended()
    assert source.check(held.update_info) == held.update_info
    for wrong in ({"path": "/etc/passwd"}, {"path": "/proc/1/mem"}, {"path": "/proc/1/fd/3/../../mem"}, {"more": ""}):
        with pytest.raises(ValueError, match="near"):
            source.check(held.update_info | {"near": held.said | wrong})


def meanwhile(owner: Any, name: str, fetch: Callable[[], Coroutine[Any, Any, None]], act: Callable[[], None]) -> None:
    """Fetch, and act while the function of that name, by which it comes, is at work."""
    real, on_its_way, goes_on = getattr(owner, name), threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        on_its_way.set()
        assert goes_on.wait(20)
        return real(*args)

    async def run() -> None:
        task = asyncio.create_task(fetch())
        assert await asyncio.to_thread(on_its_way.wait, 20)
        act()
        goes_on.set()
        await task

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, slow)
        asyncio.run(run())


def nothing() -> None:
    pass


@pytest.mark.parametrize("ended", [False, True])
def test_the_built_in_server_keeps_nothing_that_nobody_waits_for(ended: bool, tmp_path: Path) -> None:
    """A lease that ends while a version is on its way."""
    info, update = published(publisher_of("shared_memory", tmp_path), 3, NAMED), WeightUpdate(lambda: torch.float32)
    meanwhile(weight_routes, "receive", lambda: update.bring_near(info), update.forget if ended else nothing)
    assert (update.near is None) == ended


@pytest.mark.parametrize("ended", [False, True])
def test_a_vllm_server_keeps_nothing_that_nobody_waits_for(ended: bool) -> None:
    info, before = published(TcpPublisher("127.0.0.1", 10.0), 3, NAMED), open_files()
    prefetcher = Prefetcher(WeightSource("tcp", "", "", ("127.0.0.1",), 10.0))
    act = prefetcher.forget if ended else nothing
    meanwhile(prefetching, "prefetch", lambda: prefetcher.fetch({"update_info": info}), act)
    assert (prefetcher.held is None) == ended
    prefetcher.release()
    assert none_is_left(before)
