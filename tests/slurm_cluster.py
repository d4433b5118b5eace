"""A real SLURM for tests: the development cluster, started once a session, and what is asked of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from launch.dev_cluster import DevCluster, refuse_if_impossible
from prl.config.errors import UserError

SMALL = ["max_steps=4", "seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "logging=none", "ckpt.export_hf=false"]


@pytest.fixture(scope="session")
def slurm() -> Iterator[DevCluster]:
    """SLURM_CONF points to a cluster of two nodes; without the packages the test is skipped, and says so."""
    try:
        refuse_if_impossible()
    except UserError as error:
        pytest.skip(error.render())
    with tempfile.TemporaryDirectory(prefix="prl-slurm-", dir="/tmp") as directory:  # a socket's path is short
        cluster = DevCluster(Path(directory) / "c")
        cluster.up()
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SLURM_CONF", str(cluster.conf))
            yield cluster
        cluster.down()


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For another cluster: not there yet, taken down in the end."""
    with tempfile.TemporaryDirectory(prefix="prl-slurm-", dir="/tmp") as directory:
        yield Path(directory) / "c"
        DevCluster(Path(directory) / "c").down()


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def submit(
    directory: Path, *overrides: str, job: str = "sft", source: Path | None = None
) -> subprocess.CompletedProcess:
    """`python -m prl.sft -m hydra/launcher=slurm ...` in `directory`; `source`: another checkout than this one."""
    environment = os.environ | ({} if source is None else {"PYTHONPATH": str(source)})
    lines = [*SMALL, f"cache_dir={directory}/cache", *overrides]
    command = [sys.executable, "-m", f"prl.{job}", "-m", "hydra/launcher=slurm", "sweep=s", *lines]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, timeout=120)


def sweep_of(directory: Path) -> dict:
    return json.loads((directory / "outputs/sweeps/s/sweep.json").read_text())


def points_of(directory: Path) -> list[Path]:
    return [directory / "outputs/sweeps/s" / point["dir"] for point in sweep_of(directory)["points"]]


def status_of(point: Path) -> dict:
    path = point / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def steps_of(point: Path) -> list[int]:
    """Steps in the metrics, in the order written."""
    path = point / "metrics" / "trainer.0.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row["step"] for row in rows if "loss" in row]


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s\n{ask('squeue')}"
        time.sleep(0.2)


def wait_for_queue(limit_s: float = 240) -> None:
    wait_until(lambda: not ask("squeue", "--noheader"), limit_s, "an empty queue")


def states(directory: Path) -> dict[str, str]:
    """Job of each element -> its last state in the accounting, which lags behind the queue by seconds."""
    jobs = ",".join(job["job_id"] for job in sweep_of(directory)["submissions"])

    def told() -> dict[str, str]:
        lines = ask("sacct", "-X", "-n", "-P", "-o", "jobid,state", "-j", jobs).splitlines()
        return dict(line.split("|") for line in lines)

    wait_until(lambda: not {"RUNNING", "PENDING", "REQUEUED"} & set(told().values()), 60, "the end in the accounting")
    return told()


def processes_in(directory: Path) -> list[psutil.Process]:
    """All processes that name the directory on their command line or work in it, agents and all below them."""
    found = []
    for process in psutil.process_iter():
        try:
            words = " ".join(process.cmdline())
            if str(directory) in words and "prl" in words:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def agent_of(point: Path, directory: Path) -> psutil.Process:
    """The agent whose run holds the point's lock."""
    return psutil.Process(status_of(point)["root_pid"])


def copy_checkout(target: Path) -> Path:
    root = Path(__file__).parent.parent
    for name in ("prl", "conf", "launch", "sweeps"):
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    return target
