"""Helpers of the tests that start whole runs: the command line, its output, its metrics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
# what may differ between two runs that did the same: times, and what is derived from them or from the machine
TIMING = {"time", "mfu", "mfu_formula", "peak_memory_bytes", "rollouts_inflight", "overlap"}


@dataclass
class Finished:
    code: int
    output: str


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    return {**os.environ, "PYTHONPATH": path, "WANDB_MODE": "offline", "COLUMNS": "200"}


def start(args: list[str], cwd: Path, module: str = "prl.rl") -> subprocess.Popen[str]:
    command = [sys.executable, "-m", module, *args]
    return subprocess.Popen(
        command, cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def finish(process: subprocess.Popen[str], timeout_s: float = 240) -> Finished:
    output, _ = process.communicate(timeout=timeout_s)
    return Finished(process.returncode, output)


def run(args: list[str], cwd: Path, module: str = "prl.rl", timeout_s: float = 240) -> Finished:
    return finish(start(args, cwd, module), timeout_s)


def rows(run_dir: Path, role: str) -> list[dict[str, Any]]:
    path = run_dir / "metrics" / f"{role}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def series(run_dir: Path, role: str, after: int = -1) -> list[dict[str, Any]]:
    """Metrics without times, of the steps after `after`. Rows that hold nothing else are left out."""
    kept = [
        {k: v for k, v in row.items() if k not in TIMING and not k.endswith("_s")}
        for row in rows(run_dir, role)
        if row["step"] > after
    ]
    return [row for row in kept if set(row) - {"role", "step", "policy_version"}]


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if any(row["step"] >= step for row in rows(run_dir, "trainer.0")):
            return
        if process.poll() is not None:
            raise AssertionError(f"the run ended early:\n{process.communicate()[0]}")
        time.sleep(0.05)
    process.kill()
    raise AssertionError(f"no step {step} after {timeout_s} s:\n{process.communicate()[0]}")


def kill_root(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


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
