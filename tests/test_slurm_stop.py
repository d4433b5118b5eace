"""The RL job under SLURM, from a checkout's root, cancelled or sent back to the queue: nothing trained is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from slurm_cluster import (
    SMALL_RL,
    TWO_NODES,
    Held,
    ask,
    copy_checkout,
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
from prl.runtime.directory.checkpoints import latest_valid, parts_of
from prl.runtime.nodes.slurm_job import ask_kill_wait

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm")]

EXHAUSTIVE = pytest.mark.exhaustive


def submit(source: Path, nodes: int, *overrides: str, env: dict[str, str] | None = None) -> tuple[str, Path]:
    """The job and its one point, which has made some steps; nothing but a stop saves a checkpoint."""
    layout = [*TWO_NODES, "weight_transport=tcp"] if nodes == 2 else []
    lines = [*SMALL_RL, *layout, "ckpt.interval=0", "seed=1", *overrides]
    command = [sys.executable, "-m", "prl.rl", "-m", "hydra/launcher=slurm", "sweep=s", *lines]
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (point,) = points_of(source)
    wait_until(lambda: status_of(point).get("step", 0) >= 5, 150, "step 5")
    return sweep_of(source)["submissions"][0]["job_id"], point


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=EXHAUSTIVE)])
def test_a_requeued_job_goes_on_where_it_was(tmp_path, nodes):
    source = copy_checkout(tmp_path / "checkout")
    held = Held("optimizer step:8", tmp_path / "moment")
    job, point = submit(source, nodes, "max_steps=14", env=held.env)
    held.wait()
    told_at = status_of(point)["step"]
    ask("scontrol", "requeue", job)
    wait_until_stopping(point)
    held.go()
    wait_until(lambda: status_of(point).get("attempt", 0) == 2, 150, "a second attempt")
    first = read_attempts(point)[0]
    assert first["saved"] == first["step"] >= told_at
    assert (first["exit_code"], first["class"]) == (143, None)
    wait_for_queue()
    assert states(source) == {job: "COMPLETED"}
    assert status_of(point)["state"] == "done"
    assert steps_of(point) == list(range(1, 15))
    assert len(read_attempts(point)) == 2


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=EXHAUSTIVE)])
def test_a_cancelled_job_saves_and_is_gone_within_the_time_that_slurm_gives(tmp_path, nodes):
    source = copy_checkout(tmp_path / "checkout")
    job, point = submit(source, nodes, "max_steps=4000")
    ask("scancel", job)
    wait_until(lambda: not processes_in(tmp_path), ask_kill_wait() + 60, "the end of all processes")
    assert read_attempts(point)[-1].get("exit_code") == 143  # its own word: SLURM has not had to kill it
    attempt, status = read_attempts(point)[-1], status_of(point)
    assert attempt["saved"] == attempt["step"] == status["step"] == steps_of(point)[-1]
    assert (status["state"], status["failure"]) == ("stopped", None)
    assert latest_valid(point, parts_of("rl"))[0] == attempt["saved"]
    wait_for_queue()
    assert set(states(source).values()) == {"CANCELLED by 0"}
