"""Helpers of the tests that start whole runs: the command line, its output, its metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prl.runtime.directory.status_file import read_status

TESTS = Path(__file__).parent
# small enough that a run's time is mostly that of starting its processes
SMALL = [
    "warm_start=none",
    "algo.batch_size=32",
    "algo.group_size=4",
    "eval.num_tasks=8",
    "inference.sampling.max_tokens=12",
    "env.mix.reverse_text.args.max_chars=10",
    "logging.wandb.mode=disabled",
    "ckpt.export_hf=false",
]
UNEVALUATED = [*(arg for arg in SMALL if not arg.startswith("eval.")), "eval=none"]
# what may differ between two runs that did the same: times, and what is derived from them or from the machine
CLOCKED = {"mfu", "busy_imbalance", "overlap", "generating_spans"}  # besides what ends in _s
TIMING = CLOCKED | {"time", "mfu_formula", "peak_memory_bytes", "rollouts_inflight"}


@dataclass
class Finished:
    code: int
    output: str


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "offline", "COLUMNS": "200"}


def start(
    args: list[str], cwd: Path, module: str = "prl.rl", env: dict[str, str] | None = None
) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *args]
    return subprocess.Popen(
        command, cwd=cwd, env=env or environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def with_faults(name: str, **settings: str) -> dict[str, str]:
    """An environment in which the processes of a run have the faults of tests/faults/<name>.py."""
    folder, env = TESTS / "faults", environment()
    path = os.pathsep.join([str(folder), env["PYTHONPATH"]])
    return {**env, "PYTHONPATH": path, "FAULTS": str(folder / f"{name}.py"), **settings}


def finish(process: subprocess.Popen[str], timeout_s: float = 400) -> Finished:
    output, _ = process.communicate(timeout=timeout_s)
    return Finished(process.returncode, output)


def run(
    args: list[str], cwd: Path, module: str = "prl.rl", timeout_s: float = 400, env: dict[str, str] | None = None
) -> Finished:
    return finish(start(args, cwd, module, env), timeout_s)


def rows(run_dir: Path, role: str) -> list[dict[str, Any]]:
    """Of a file that may be being written: a last line that has no end yet is not there yet."""
    path = run_dir / "metrics" / f"{role}.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def series(run_dir: Path, role: str, after: int = -1) -> list[dict[str, Any]]:
    """Metrics without times, of the steps after `after`. Rows that hold nothing else are left out."""
    kept = [
        {k: v for k, v in row.items() if k not in TIMING and not k.endswith("_s")}
        for row in rows(run_dir, role)
        if row["step"] > after
    ]
    return [row for row in kept if set(row) - {"role", "step", "policy_version"}]


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout_s: float = 200) -> None:
    wait_for(process, lambda: any(row["step"] >= step for row in rows(run_dir, "trainer.0")), f"step {step}", timeout_s)


def wait_for_checkpoint(process: subprocess.Popen[str], run_dir: Path, step: int, timeout_s: float = 200) -> None:
    """Until it counts; steps go on while a checkpoint is written, so that their rows say nothing about it."""
    saved = run_dir / "checkpoints" / f"step_{step}"
    wait_for(process, saved.exists, f"checkpoint of step {step}", timeout_s)


def wait_for(process: subprocess.Popen[str], came: Callable[[], bool], what: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if came():
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.communicate()[0]}")
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no {what} after {timeout_s} s:\n{process.communicate()[0]}")


class Moment:
    """A moment of tests/faults/moments.py: the run's environment for it, and what a test does there."""

    def __init__(self, name: str, folder: Path) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.env = with_faults("moments", MOMENT=name, MOMENT_DIR=str(folder))

    def wait(self, process: subprocess.Popen[str], timeout_s: float = 240) -> int:
        """Until a process of the run is there; returns its pid."""
        deadline = time.monotonic() + timeout_s
        while not (self.folder / "reached").exists():
            assert process.poll() is None, f"the run ended before:\n{process.communicate()[0]}"
            assert time.monotonic() < deadline, "nobody came to the moment"
            time.sleep(0.01)
        return int((self.folder / "reached").read_text())

    def go(self) -> None:
        (self.folder / "go").touch()


def kill_root(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def wait_until_gone(run_dir: Path, timeout_s: float = 120) -> None:
    """Until no process names the run directory any more."""
    deadline = time.monotonic() + timeout_s
    while left := processes_of(run_dir):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def wait_until_stopping(process: subprocess.Popen[str], run_dir: Path) -> None:
    """Until the run has been told to."""
    wait_for(process, lambda: read_status(run_dir).get("state") == "stopping", "stop", 120)


def kill_for_sure(pid: int) -> None:
    """Return when it is dead, and its connections are closed."""
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return
        if state in "ZX":
            return
        time.sleep(0.01)


def processes_of(run_dir: Path) -> list[str]:
    """Command lines of living processes that name the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                state = (entry / "stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if str(run_dir) in line and state != "Z":
                found.append(line)
    return found
