"""Nobody gets a signal who is not meant: process numbers in files are of another time, or of another machine."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tree import Start, start, wait_for

from prl.config import compose
from prl.config.errors import UserError
from prl.planning.planner import make_plan
from prl.runtime.directory import rundir
from prl.runtime.directory.identity import describe_process, find_process, signal_process
from prl.runtime.directory.rundir import claim
from prl.runtime.process.reaper import Watch

__all__ = ["start"]

STATUS = {"state": "running", "step": 1, "max_steps": 2, "attempt": 1, "updated": 0.0, "failure": None, "roles": {}}


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else's process, in a group of its own."""
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def locked_run(tmp_path: Path) -> Iterator[Path]:
    """A run directory whose lock is held: the run lives, say on another machine that shares the directory."""
    run = tmp_path / "sweep" / "point"
    run.mkdir(parents=True)
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield run


def cancel(path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "prl.cancel", str(path)], capture_output=True, text=True, timeout=200)


def test_what_is_not_there_cannot_be_cancelled(tmp_path: Path) -> None:
    done = cancel(tmp_path / "nothing")
    assert done.returncode == 2
    assert f"There is no directory {tmp_path}/nothing" in done.stderr


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"started": "1"}, "does not say which process it is: gone"),
        ({"system": "another boot", "host": "n17"}, "runs on n17"),
        ({"pid": None}, "does not say which process it is: unknown"),
        (None, "does not say which process it is: unknown"),  # as earlier versions wrote it
    ],
    ids=["a number used again", "another machine", "no number", "no record"],
)
def test_cancel_leaves_strangers_alone_and_says_so(locked_run, stranger, changed, told):
    root = {} if changed is None else {"root": describe_process(stranger.pid) | changed}
    (locked_run / "status.json").write_text(json.dumps(STATUS | {"root_pid": stranger.pid} | root))
    for path in (locked_run, locked_run.parent):
        done = cancel(path)
        assert (done.returncode, done.stdout) == (1, "")
        assert told in done.stderr
    assert stranger.poll() is None


def test_cancel_stops_the_run_it_means(start: Start):
    slow = {name: {"step_s": 0.1} for name in ("orchestrator", "trainer/0")}
    root = start("max_steps=4000", script=slow)
    root.await_step(3)
    done = cancel(root.run_dir)
    assert (done.returncode, done.stderr) == (0, "")
    assert root.wait()[0] == 143
    again = cancel(root.run_dir)
    assert (again.returncode, again.stdout) == (1, "")
    assert f"nothing was running or waiting: {root.run_dir} is a run that is stopped, step" in again.stderr


def test_a_record_finds_its_process_and_no_other(stranger):
    record = describe_process(stranger.pid)
    assert find_process(record) == "alive"
    assert find_process(describe_process()) == "alive"
    for changed, where in (({"started": "1"}, "gone"), ({"system": "x"}, "elsewhere"), ({"started": None}, "unknown")):
        assert signal_process(record | changed, signal.SIGKILL) == where
    assert find_process({}) == find_process(None) == "unknown"
    assert stranger.poll() is None
    assert signal_process(record, signal.SIGKILL) == "alive"
    wait_for(lambda: find_process(record) == "gone")  # a zombie is nobody
    stranger.wait()
    assert signal_process(record, signal.SIGKILL) == "gone"


def test_the_reaper_spares_a_group_whose_number_was_used_again(stranger):
    watch = Watch("no such marker")
    watch.groups = {stranger.pid: 1}  # a child that was started long before
    watch.seen = {stranger.pid: 1}
    watch.kill_all()
    assert stranger.poll() is None
    assert watch.groups == {}
    watch.obey(f"+{stranger.pid}")
    watch.kill_all()
    assert stranger.wait(60) == -signal.SIGKILL


def test_a_lock_names_its_holder_and_waits_for_who_is_gone(tmp_path, stranger, monkeypatch):
    monkeypatch.setattr(rundir, "LOCK_WAIT_S", 0.5)
    plan = make_plan(compose(["warm_start=none"]).model_copy(update={"output_dir": str(tmp_path / "run")}))
    claimed = claim(plan)
    with pytest.raises(UserError, match=rf"a run is alive in .* \(process {os.getpid()} on "):
        claim(plan)
    os.truncate(claimed.lock_fd, 0)
    os.pwrite(claimed.lock_fd, str(stranger.pid).encode(), 0)  # as earlier versions wrote it: it proves nothing
    with pytest.raises(UserError, match="a run is alive"):
        claim(plan)
    claimed.release()
    claim(plan).release()
