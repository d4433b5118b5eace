"""Jobs of two nodes on a real SLURM: one agent on each node, one run."""

import json
import os
import subprocess
import sys

import psutil
import pytest
from slurm_cluster import (
    SMALL_RL,
    TWO_NODES,
    Held,
    ask,
    points_of,
    processes_in,
    states,
    status_of,
    steps_of,
    sweep_of,
    wait_for_queue,
    wait_until,
    wait_until_stopping,
)

from prl.runtime.agent import read_attempts

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm")]

OVER_TCP = ["weight_transport=tcp", *SMALL_RL]
LONG = ["max_steps=16", "slurm.signal_delay_s=20", "ckpt.interval=2", *OVER_TCP]


def submit(directory, *overrides, env=None):
    command = [
        sys.executable,
        "-m",
        "prl.rl",
        "-m",
        "hydra/launcher=slurm",
        "sweep=s",
        f"cache_dir={directory}/cache",
    ]
    lines = [*TWO_NODES, *overrides, "seed=1"]
    done = subprocess.run([*command, *lines], cwd=directory, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (point,) = points_of(directory)
    return sweep_of(directory)["submissions"][0]["job_id"], point


def node_of(pid):
    return psutil.Process(pid).environ()["SLURMD_NODENAME"]


def pids_of(point):
    return {name: role["pid"] for name, role in status_of(point)["roles"].items()}


def test_a_disaggregated_job_on_two_nodes_trains_over_tcp(tmp_path):
    held = Held("optimizer step:2", tmp_path / "moment")
    job, point = submit(tmp_path, "max_steps=4", *OVER_TCP, env=held.env)
    held.wait()
    pids = pids_of(point)
    assert {name: node_of(pids[name]) for name in ("inference/0", "inference/1", "orchestrator")} == dict.fromkeys(
        ("inference/0", "inference/1", "orchestrator"), "n0"
    )
    assert [node_of(pids[f"trainer/{rank}"]) for rank in (0, 1)] == ["n1", "n1"]
    held.go()
    wait_for_queue()
    assert states(tmp_path) == {job: "COMPLETED"}
    assert status_of(point)["state"] == "done"
    assert steps_of(point) == [1, 2, 3, 4]
    assert not (point / "weights").exists(), "weights went over TCP"
    logs = {path.name for path in (point / "logs").iterdir()}
    assert {
        "inference.0.0.log",
        "inference.0.1.log",
        "trainer.1.0.log",
        "trainer.1.1.log",
        "latest.trainer.log",
    } <= logs


@pytest.mark.exhaustive
def test_a_warning_reaches_the_run_on_both_nodes_and_it_resumes(tmp_path):
    held = Held("optimizer step:8", tmp_path / "moment")
    job, point = submit(tmp_path, *LONG, env=held.env)
    held.wait()
    ask("scancel", "--signal=USR2", job)
    wait_until_stopping(point)
    held.go()
    wait_until(lambda: status_of(point).get("attempt", 0) == 2, 120, "a second attempt")
    wait_for_queue()
    assert states(tmp_path) == {job: "COMPLETED"}
    assert steps_of(point) == list(range(1, 17))


def test_scancel_leaves_no_process_on_either_node(tmp_path):
    job, point = submit(tmp_path, *LONG, "max_steps=4000")
    wait_until(lambda: status_of(point).get("step", 0) >= 2, 150, "step 2")
    assert {node_of(pid) for pid in pids_of(point).values()} == {"n0", "n1"}
    ask("scancel", job)
    wait_until(lambda: not processes_in(tmp_path), 90, "the end of all processes")
    wait_for_queue()
    assert states(tmp_path) == {job: f"CANCELLED by {os.getuid()}"}


@pytest.mark.parametrize(
    "node",
    [pytest.param("n1", id="another node"), pytest.param("n0", id="the root's node", marks=pytest.mark.exhaustive)],
)
def test_a_node_that_dies_requeues_the_job_once_and_it_resumes(tmp_path, slurm, node):
    """The root notices another node's death at once and requeues; of its own node, SLURM does after SlurmdTimeout."""
    held = Held("optimizer step:8", tmp_path / "moment")
    job, point = submit(tmp_path, *LONG, env=held.env)
    held.wait()
    slurm.kill_node(node)
    held.go()
    wait_until(lambda: ask("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "PENDING", 90, "the requeue")
    slurm.start_node(node)
    wait_for_queue()
    assert "Restarts=1 " in ask("scontrol", "show", "job", job) + " "
    assert status_of(point)["state"] == "done"
    assert steps_of(point) == list(range(1, 17))
    rows = [json.loads(line) for line in (point / "attempts.jsonl").read_text().splitlines()]
    assert [row["attempt"] for row in rows if "started" in row] == [1, 2]
    assert [row["class"] for row in read_attempts(point)] == ["node", None]
