"""A root process with tiny roles, and what of it is alive: for the tests of the process tree."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prl.config import compose
from prl.config.schema import RunConfig
from prl.metrics.writer import metrics_path
from prl.runtime.directory.status_file import read_status

TESTS = Path(__file__).parent
TAG = "PRL_TEST_TREE"  # everything that descends from a root started here carries it
LIMIT_S = 120.0  # ends hangs only: starting takes seconds, on a busy machine many
SMALL = ("logging.wandb.mode=disabled", "max_steps=6")


@functools.cache
def compose_once(config: str, overrides: tuple[str, ...]) -> RunConfig:
    return compose(list(overrides), config)


def make_config(config: str, overrides: tuple[str, ...], run_dir: Path) -> RunConfig:
    """Composed here and not by the root: that takes longer than everything else it does."""
    small = ("warm_start=none", *SMALL) if config == "rl" else SMALL
    composed = compose_once(config, (*small, *overrides))
    fresh = "output_dir=null" in overrides
    places = {"output_dir": None if fresh else str(run_dir), "cache_dir": str(run_dir.parent / "cache")}
    return composed.model_copy(update=places)


class Root:
    """`python runtime_roles.py` in a session of its own."""

    def __init__(
        self,
        run_dir: Path,
        *overrides: str,
        config: str = "rl",
        script: dict | None = None,
        stdout: int = subprocess.PIPE,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.run_dir, self.tag = run_dir, uuid.uuid4().hex
        variables = os.environ | {
            "ROLE_SCRIPT": json.dumps(script or {}),
            "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)]),
            TAG: self.tag,
            **(environment or {}),
        }
        config_path = run_dir.parent / f"config-{self.tag}.json"
        config_path.write_text(make_config(config, overrides, run_dir).model_dump_json())
        self.process = subprocess.Popen(
            [sys.executable, str(TESTS / "runtime_roles.py"), str(config_path)],
            env=variables,
            cwd=run_dir.parent,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def wait(self, timeout_s: float = LIMIT_S) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def status(self) -> dict:
        return read_status(self.run_dir)

    def pid_of(self, role_name: str) -> int:
        return self.status()["roles"][role_name]["pid"]

    def await_step(self, step: int, who: Callable[[Iterable[int]], int] = min) -> None:
        """`who`: min for all workers, max for the first one that gets there: scripted ones step by themselves."""
        wait_for(lambda: who(self.rows_written().values()) >= step)

    def await_running(self) -> None:
        """Until all roles are up: scripted workers step before that, and a stop then has nothing to wait for."""
        wait_for(lambda: self.status().get("state") == "running")

    def rows_written(self) -> dict[str, int]:
        """Worker -> the steps that it has logged; {"": 0} before there are any."""
        names = [name for name in self.status().get("roles", {}) if name.startswith(("trainer", "orchestrator"))]
        return {name: len(read_bytes(metrics_path(self.run_dir, name)).splitlines()) for name in names} or {"": 0}

    def await_listening(self, log: str, times: int) -> list[tuple[str, str]]:
        """(port, restarts) as a server with `tell_port` has told them at each of its starts."""
        path = self.run_dir / "logs" / log
        wait_for(lambda: len(found_in(path)) == times)
        return found_in(path)

    def alive(self) -> list[int]:
        """Living processes of the tree, root and reaper included."""
        wanted = f"{TAG}={self.tag}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if wanted in read_bytes(path)]

    def await_gone(self) -> None:
        """Until nothing of the tree is alive."""
        try:
            wait_for(lambda: not self.alive())
        except AssertionError as error:
            raise AssertionError(f"alive: {[told_of(pid) for pid in self.alive()]}") from error

    def reapers(self) -> list[int]:
        return [pid for pid in self.alive() if b"reaper.py" in read_bytes(Path(f"/proc/{pid}/cmdline"))]

    def await_surveys(self, times: int = 4) -> None:
        """Until all reapers have looked round from now on: between two of their sleeps they do, once a second."""
        before = {pid: sleeps_of(pid) for pid in self.reapers()}
        assert before
        wait_for(lambda: all(sleeps_of(pid) >= count + times for pid, count in before.items()))

    def end(self) -> None:
        """Whatever the test left."""
        self.process.kill()
        self.process.communicate()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


def told_of(pid: int) -> tuple[int, bytes, bytes, bytes]:
    """Of a process that should be gone: its number, its command, in which state it is, and where in the kernel."""
    state, where = (read_bytes(Path(f"/proc/{pid}/{name}")) for name in ("status", "wchan"))
    return pid, read_bytes(Path(f"/proc/{pid}/cmdline")), state[: state.find(b"VmPeak")], where


def sleeps_of(pid: int) -> int:
    """How often a process has gone to sleep."""
    (count,) = re.findall(rb"\nvoluntary_ctxt_switches:\s+(\d+)", read_bytes(Path(f"/proc/{pid}/status")))
    return int(count)


def found_in(log: Path) -> list[tuple[str, str]]:
    return re.findall(r"LISTENS (\d+) RESTARTS (\d)\n", read_bytes(log).decode())


Start = Callable[..., Root]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts roots, and ends them after the test."""
    roots: list[Root] = []

    def start_root(*overrides: str, name: str = "run", **more: Any) -> Root:
        roots.append(Root(tmp_path / name, *overrides, **more))
        return roots[-1]

    yield start_root
    for root in roots:
        root.end()


def wait_for(condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def mount_small_disk(path: Path, options: str = "size=256k,nr_inodes=64") -> Iterator[Path]:
    """A file system of 256 KiB and 64 inodes, or as tmpfs has it; skips the test where mounting is not allowed."""
    path.mkdir(exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"a small file system needs the right to mount: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def fill_bytes(disk: Path) -> Path:
    filler = disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(os.urandom(4096))
    return filler


def read_bytes(path: Path) -> bytes:
    """Its content; empty if it, or the process behind it, is gone."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
