"""A root process with tiny roles, and what of it is alive: for the tests of the process tree."""

from __future__ import annotations

import contextlib
import functools
import json
import os
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
from prl.runtime.status_file import read_status

TESTS = Path(__file__).parent
TAG = "PRL_TEST_TREE"  # everything that descends from a root started here carries it
GONE_S = 5.0  # what the product promises
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

    def wait(self, timeout_s: float = 60) -> tuple[int, str]:
        """Exit code and output."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def status(self) -> dict:
        return read_status(self.run_dir)

    def pid_of(self, role_name: str) -> int:
        return self.status()["roles"][role_name]["pid"]

    def await_step(self, step: int, who: Callable[[Iterable[int]], int] = max) -> None:
        """`who`: max for the first role that gets there, min for all: scripted ones step by themselves."""
        wait_for(lambda: who(rows_written(self.run_dir) or [0]) >= step)

    def alive(self) -> list[int]:
        """Living processes of the tree, root and reaper included."""
        wanted = f"{TAG}={self.tag}".encode()
        return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/environ") if wanted in read_bytes(path)]

    def await_gone(self) -> float:
        """Seconds until nothing of the tree was alive; fails after GONE_S."""
        started_s = time.monotonic()
        wait_for(lambda: not self.alive(), GONE_S)
        return time.monotonic() - started_s

    def end(self) -> None:
        """Whatever the test left."""
        self.process.kill()
        self.process.communicate()
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)


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


def rows_written(run_dir: Path) -> list[int]:
    """Steps that each worker has logged."""
    return [len(read_bytes(path).splitlines()) for path in (run_dir / "metrics").glob("[ot]r*.jsonl")]


def wait_for(condition: Callable[[], bool], timeout_s: float = 45) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def mount_small_disk(path: Path) -> Iterator[Path]:
    """A file system of 256 KiB and 64 inodes; skips the test where mounting is not allowed."""
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "tmpfs", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    yield path
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
