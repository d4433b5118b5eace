"""A real SLURM for tests: the development cluster, started once a session, and what is asked of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from runs import Moment, rows

from launch.dev_cluster import DevCluster, refuse_if_impossible
from prl.config.errors import UserError

SMALL = ["max_steps=4", "seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "logging=none", "ckpt.export_hf=false"]
SMALL.append("debug.num_threads=1")
SMALL_RL = [
    "warm_start=none",
    "eval=none",
    "logging=none",
    "algo.batch_size=16",
    "inference.sampling.max_tokens=16",
    "ckpt.export_hf=false",
]
QUESTIONS = ("squeue", "sacct", "sinfo")  # to ask twice changes nothing
NO_ANSWER = re.compile("timed out|Unable to contact|Connection (refused|reset)", re.IGNORECASE)
ASK_TIMES = 5
TWO_NODES = ["deployment=multi_node", "deployment.gpus_per_node=2", "deployment.device=cpu"]


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


@pytest.fixture(autouse=True)
def no_job_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that failed leaves the nodes to the next one."""
    yield
    if "slurm" in request.fixturenames:
        for _ in range(100):
            if not ask("squeue", "--noheader"):
                break
            subprocess.run(["scancel", "--user=root"], check=False, timeout=60)
            time.sleep(1)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """For another cluster: not there yet, taken down in the end."""
    with tempfile.TemporaryDirectory(prefix="prl-slurm-", dir="/tmp") as directory:
        yield Path(directory) / "c"
        DevCluster(Path(directory) / "c").down()


def ask(*command: str) -> str:
    """What it prints. A question that a busy controller or database leaves without an answer is asked again."""
    for left in reversed(range(ASK_TIMES)):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if not (left and done.returncode and command[0] in QUESTIONS and NO_ANSWER.search(done.stderr)):
            break
        time.sleep(1)
    done.check_returncode()
    return done.stdout.strip()


class Held:
    """A moment at which each element of a job stays until the test has done what it wants to do while the job runs."""

    def __init__(self, name: str, folder: Path, elements: int = 1) -> None:
        self.moments = [Moment(name, folder / str(index)) for index in range(elements)]
        where = folder / ("0" if elements == 1 else "$SLURM_ARRAY_TASK_ID")
        self.env = self.moments[0].env | {"MOMENT_DIR": str(where)}  # of the submission, which jobs inherit

    def wait(self) -> None:
        for moment in self.moments:
            wait_until((moment.folder / "reached").exists, 200, f"the moment {self.env['MOMENT']}")

    def go(self) -> None:
        for moment in self.moments:
            moment.go()


def wait_until_stopping(point: Path) -> None:
    """Until the run has been told to, so that it cannot come to its end instead."""
    wait_until(lambda: status_of(point).get("state") == "stopping", 60, f"that {point.name} stops")


def submit(
    directory: Path, *overrides: str, job: str = "rl", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """`python -m prl.JOB -m hydra/launcher=slurm ...` in `directory`."""
    lines = [*(SMALL if job == "sft" else SMALL_RL), f"cache_dir={directory}/cache", *overrides]
    command = [sys.executable, "-m", f"prl.{job}", "-m", "hydra/launcher=slurm", "sweep=s", *lines]
    return subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, timeout=300)


def sweep_of(directory: Path) -> dict:
    return json.loads((directory / "outputs/sweeps/s/sweep.json").read_text())


def points_of(directory: Path) -> list[Path]:
    return [directory / "outputs/sweeps/s" / point["dir"] for point in sweep_of(directory)["points"]]


def status_of(point: Path) -> dict:
    path = point / "status.json"
    return json.loads(path.read_text()) if path.exists() else {}


def steps_of(point: Path) -> list[int]:
    """Steps in the metrics, in the order written."""
    return [row["step"] for row in rows(point, "trainer.0") if "loss" in row]


def wait_until(condition: Callable[[], object], limit_s: float, what: str) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {limit_s} s\n{ask('squeue')}"
        time.sleep(0.2)


def wait_for_queue(limit_s: float = 400) -> None:
    wait_until(lambda: not ask("squeue", "--noheader"), limit_s, "an empty queue")


def states(directory: Path) -> dict[str, str]:
    """Job of each element -> its last state in the accounting, which lags behind the queue by seconds."""
    submissions = sweep_of(directory)["submissions"]
    jobs = ",".join(job["job_id"] for job in submissions)
    elements = {
        f"{job['job_id']}_{index}" if job["is_array"] else job["job_id"]
        for job in submissions
        for index in range(len(job["points"]))
    }
    told: dict[str, str] = {}

    def have_ended() -> bool:
        told.clear()
        lines = ask("sacct", "-X", "-n", "-P", "-o", "jobid,state", "-j", jobs).splitlines()
        told.update(line.split("|") for line in lines)
        return elements <= set(told) and not {"RUNNING", "PENDING", "REQUEUED"} & set(told.values())

    wait_until(have_ended, 60, "the end in the accounting")
    return told


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
