"""A process of a benchmark that dies ends it in words, and leaves none of the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from prl.bench.processes import Processes
from prl.config.errors import UserError


def answer(pipe: Connection) -> None:
    while (said := pipe.recv()) is not None:
        pipe.send(said + 1)


def end(how: str, pipe: Connection) -> None:
    pipe.recv()
    if how == "raise":
        raise ValueError("something is wrong")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize(("how", "why"), [("raise", "exit code 1"), ("kill", "SIGKILL"), ("return", "exit code 0")])
def test_one_that_ends_early_is_named(how: str, why: str) -> None:
    with Processes("fork") as processes:
        good, bad = processes.start("the good one", answer), processes.start("the bad one", end, how)
        processes.tell([good], 1)
        assert processes.hear(good) == 2
        processes.tell([bad], 1)
        with pytest.raises(UserError) as caught:
            processes.hear(bad)
    assert caught.value.where == "the bad one"
    assert why in (caught.value.why or "")
    assert not any(process.is_alive() for process in processes.started)


@pytest.mark.parametrize("before", [False, True])
def test_the_death_of_another_is_noticed_by_who_waits(before: bool) -> None:
    with Processes("fork") as processes:
        waiting, bad = processes.start("waits for ever", answer), processes.start("the bad one", end, "kill")
        processes.tell([bad], 1)
        if before:
            processes.started[bad].join()
        with pytest.raises(UserError, match=r"before its time"):
            processes.hear(waiting)


def test_nobody_is_told_what_a_dead_one_cannot_hear() -> None:
    with Processes("fork") as processes:
        gone = processes.start("gone", end, "return")
        processes.tell([gone], 1)
        processes.started[gone].join()
        with pytest.raises(UserError) as caught:
            processes.tell([gone], 1)
    assert caught.value.where == "gone"


CONTROL_PLANE = "control_plane --steps=1000 --trainers=1 --rollouts=4"
PUBLICATION = "publication --versions=1000 --trainers=4 --ep=2 --engines=1 --tp=2 --layers=2"
LAST = {"publication": 6}  # processes that end with the benchmark, if there are others, whose death may be their end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bench", "which"),
    [
        pytest.param(CONTROL_PLANE, 0, id="an engine of control_plane"),
        pytest.param(CONTROL_PLANE, -1, id="a trainer of control_plane"),
        pytest.param(PUBLICATION, 0, id="publication"),
        pytest.param("publication_host --mib=1024 --ranks=2 --engines=1", -1, id="publication_host"),
        pytest.param("expert_dispatch --tokens=1000 --nodes=2", -1, id="expert_dispatch"),
        pytest.param("checkpoint --gib=0.5 --saves=1000 --variants=prl", 0, id="checkpoint"),
    ],
)
def test_a_benchmark_whose_process_is_killed_says_so(bench: str, which: int, tmp_path: Path) -> None:
    with running(bench, tmp_path) as (ours, computing):
        computing[which].kill()
        said = ours.communicate(timeout=120)[1]
    assert ours.returncode == 2, said
    assert "A process of the benchmark has ended before its time" in said
    assert "SIGKILL" in said


@pytest.mark.slow
def test_a_benchmark_that_is_terminated_leaves_nothing(tmp_path: Path) -> None:
    with running("checkpoint --gib=0.1 --saves=1000 --variants=prl", tmp_path) as (ours, _):
        ours.terminate()
        said = ours.communicate(timeout=120)[1]
    assert ours.returncode == 128 + signal.SIGTERM, said


@pytest.mark.slow
def test_processes_of_a_benchmark_that_is_killed_end_with_it(tmp_path: Path) -> None:
    with running(PUBLICATION, tmp_path) as (ours, _):  # which looks that nothing is left
        ours.kill()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(bench: str, temporary: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process]]]:
    """A benchmark, and processes of its that compute. Nothing is left of it afterwards."""
    name, *words = bench.split()
    command = [sys.executable, "-m", f"prl.bench.{name}", *words]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    ours = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    me, last = psutil.Process(ours.pid), LAST.get(name)
    try:
        while True:
            alive = [one for one in me.children() if is_alive(one)]
            computing = [one for one in alive if one.cpu_times().user > 0.5]
            if len(computing) >= 2 and last in (None, len(alive)):
                break
            assert ours.poll() is None, ours.stderr and ours.stderr.read()
            time.sleep(0.02)
        family = me.children(recursive=True)
        yield ours, computing
    finally:
        ours.kill()
    psutil.wait_procs(family, timeout=10)
    assert not [one for one in family if is_alive(one)]
    assert not [path for path in temporary.iterdir() if path.name.startswith("tmp")]
