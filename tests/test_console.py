"""The console is never a reason to stop: readers that leave, full disks, terminals that are closed or halted."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs import environment, rows
from runtime_tree import Start, start, wait_for

from prl.runtime.directory.checkpoints import steps

__all__ = ["start"]

SMALL_SFT = ["max_steps=6", "seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "logging=none", "ckpt.interval=2"]
SMALL_SFT.append("debug.num_threads=1")  # threads that spin take the cores from the tests beside this one
SLOW_STEPS = {name: {"step_s": 0.1} for name in ("orchestrator", "trainer/0")}


def command_lines(sweep: Path) -> dict[str, list[str]]:
    """Entry point -> its arguments, such that it prints something."""
    return {
        "prl.plan": [],
        "prl.cli": ["plan", "--json"],
        "prl.rl": ["--cfg", "job"],
        "prl.sft": ["--help"],
        "prl.bench": ["no_such_key=1"],
        "prl.inference": ["--info", "defaults"],
        "prl.status": [str(sweep)],
        "prl.compare": [str(sweep)],
        "prl.cancel": [str(sweep)],
        "prl.runtime.agent": [str(sweep / "nowhere")],
    }


@pytest.fixture(scope="module")
def sweep(tmp_path_factory) -> Path:
    """A sweep with one point that failed."""
    path = tmp_path_factory.mktemp("sweep")
    done = subprocess.run(
        [sys.executable, "-m", "prl.plan", "--json", "-cn", "sft"], capture_output=True, text=True, check=True
    )
    (path / "point").mkdir()
    (path / "point" / "plan.json").write_text(done.stdout)
    failure = {"class": "oom", "role": "trainer/0", "message": "out of memory", "log_tail": []}
    status = {"state": "failed", "step": 1, "max_steps": 2, "attempt": 1, "updated": 0.0, "failure": failure}
    (path / "point" / "status.json").write_text(json.dumps(status))
    return path


@contextlib.contextmanager
def broken_output(kind: str):
    """A file descriptor to write to in vain."""
    if kind == "/dev/full":
        with open("/dev/full", "wb") as file:
            yield file.fileno()
        return
    read, write = os.pipe()
    os.close(read)
    yield write
    os.close(write)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reader left", pytest.param("/dev/full", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("module", list(command_lines(Path())))
def test_no_program_ends_with_a_traceback(sweep, module, kind):
    command = [sys.executable, "-m", module, *command_lines(sweep)[module]]
    whole = subprocess.run(command, capture_output=True, text=True, cwd=sweep, timeout=200)
    with broken_output(kind) as output:
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, cwd=sweep, timeout=200)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    is_table = module in ("prl.plan", "prl.cli", "prl.status", "prl.compare")
    told = is_table and kind == "/dev/full"
    assert ("could not be written" in done.stderr) == told
    assert done.returncode == (1 if told else whole.returncode)
    with broken_output(kind) as output:  # where errors go nowhere either
        done = subprocess.run(command, stdout=output, stderr=output, cwd=sweep, timeout=200)
    assert done.returncode == (1 if told else whole.returncode)


def test_closed_files_are_no_reason_to_stop(sweep):
    command = f"exec {sys.executable} -m prl.status {sweep} >&- 2>&- <&-"
    assert subprocess.run(["bash", "-c", command], timeout=200).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("output", ["| head -2", "> /dev/full 2>&1"])
def test_a_run_goes_on_when_nobody_reads_what_it_prints(tmp_path, output):
    lines = " ".join([*SMALL_SFT, f"output_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"])
    command = f"set -o pipefail; {sys.executable} -m prl.sft {lines} {output}"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, env=environment(), capture_output=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "done"
    assert [row["step"] for row in rows(tmp_path / "run", "trainer.0")] == [1, 2, 3, 4, 5, 6]
    assert steps(tmp_path / "run")[-1] == 6


def test_a_reader_who_does_not_read_holds_nobody_up(start: Start):
    read, write = os.pipe()
    with contextlib.suppress(BlockingIOError):
        os.set_blocking(write, False)
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    root = start("max_steps=30", "logging.progress=plain", script=SLOW_STEPS, stdout=write)
    assert root.process.wait(120) == 0
    assert root.status()["state"] == "done"
    os.close(read)
    os.close(write)


@pytest.mark.parametrize("mode", ["live", "plain"])
def test_a_terminal_that_is_closed_stops_a_run_in_order(start: Start, mode: str):
    """SIGHUP, and then nothing that it prints arrives: EIO."""
    terminal, its_end = pty.openpty()
    root = start("max_steps=4000", f"logging.progress={mode}", script=SLOW_STEPS, stdout=its_end)
    os.close(its_end)
    root.await_step(4)
    root.await_running()
    os.close(terminal)
    time.sleep(0.5)
    assert root.process.poll() is None, "no signal has come, for this is not its controlling terminal"
    root.process.send_signal(signal.SIGHUP)
    assert root.process.wait(120) == 128 + signal.SIGHUP
    status = root.status()
    assert (status["state"], status["failure"]) == ("stopped", None)
    assert steps(root.run_dir)[-1] == len(rows(root.run_dir, "orchestrator"))  # scripted roles step by themselves
    wait_for(lambda: not root.alive())
