"""A sweep of points side by side on this machine, and what becomes of them when it is stopped or killed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from runs import environment, processes_of, rows
from runtime_tree import wait_for
from slurm_cluster import SMALL_RL, copy_checkout, points_of, status_of

from launch.submitting import SUBMIT_LOCK
from prl.runtime.agent import read_attempts
from prl.runtime.directory.checkpoints import latest_valid, parts_of
from prl.runtime.directory.files import locked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SWEEP = "outputs/sweeps/s"
LONG = [
    *("max_steps=4000", "seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "logging=none", "ckpt.interval=0"),
    *("hydra.launcher.parallel_points=2", "hydra/launcher=local", "sweep=s", "seed=1,2,3", "ckpt.export_hf=false"),
    "debug.num_threads=1",
]


@contextlib.contextmanager
def started(tmp_path: Path, *lines: str, env: dict[str, str] | None = None):
    """`python -m prl.sft -m`; nothing of it is left in the end."""
    command = [sys.executable, "-m", "prl.sft", "-m", *LONG, f"cache_dir={tmp_path}/cache", *lines]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=env or environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        left = [*psutil.Process(process.pid).children(recursive=True)] if process.poll() is None else []
        process.kill()
        for child in left:
            child.kill()


@pytest.fixture
def sweep(tmp_path: Path):
    """Two points that train, and one that waits."""
    with started(tmp_path) as process:
        wait_for_training(process, tmp_path, 2)
        yield process


def wait_for_training(process: subprocess.Popen[str], tmp_path: Path, points: int) -> list[Path]:
    wait_for(lambda: process.poll() is not None or len(training(tmp_path)) == points, 240)
    assert process.poll() is None, process.communicate()[0]
    return training(tmp_path)


def training(tmp_path: Path) -> list[Path]:
    """Points that have made some steps."""
    return [path for path in sorted((tmp_path / SWEEP).glob("seed*")) if len(rows(path, "trainer.0")) >= 3]


def check_saved(point: Path) -> None:
    status = json.loads((point / "status.json").read_text())
    assert (status["state"], status["failure"]) == ("stopped", None)
    step = max(row["step"] for row in rows(point, "trainer.0"))
    assert latest_valid(point, parts_of("sft"))[0] == step


@pytest.mark.parametrize(
    "how", ["Ctrl-C", *(pytest.param(how, marks=pytest.mark.exhaustive) for how in ("SIGTERM", "a closed terminal"))]
)
def test_one_signal_stops_all_points_with_their_checkpoints(sweep, tmp_path, how):
    if how == "Ctrl-C":
        os.killpg(sweep.pid, signal.SIGINT)  # as a terminal does it: to all of its processes
    else:
        sweep.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGHUP)
    output, _ = sweep.communicate(timeout=240)
    assert sweep.returncode == 128 + {"Ctrl-C": 2, "SIGTERM": 15}.get(how, 1), output
    assert "Traceback" not in output
    points = training(tmp_path)
    assert len(points) == 2
    for point in points:
        check_saved(point)
    assert len(list((tmp_path / SWEEP).glob("*/status.json"))) == 2, "the third was not started"
    wait_for(lambda: not processes_of(tmp_path))


@pytest.mark.parametrize("how", [pytest.param("SIGINT", marks=pytest.mark.exhaustive), "SIGKILL"])
def test_an_impatient_end_leaves_no_process(sweep, tmp_path, how):
    assert len(processes_of(tmp_path)) >= 5  # two points: agent, trainer, and the sweep
    if how == "SIGKILL":
        sweep.kill()
    else:
        os.killpg(sweep.pid, signal.SIGINT)
        time.sleep(0.3)
        os.killpg(sweep.pid, signal.SIGINT)
    sweep.wait(120)
    wait_for(lambda: not processes_of(tmp_path))
    if how == "SIGKILL":
        wait_for(lambda: {read_state(point) for point in training(tmp_path)} == {"failed"})


def read_state(point: Path) -> str:
    return json.loads((point / "status.json").read_text())["state"]


def test_a_cancelled_point_ends_the_sweep(tmp_path):
    with started(tmp_path, "hydra.launcher.parallel_points=1") as process:
        wait_for_training(process, tmp_path, 1)
        cancel = [sys.executable, "-m", "prl.cancel", SWEEP]
        done = subprocess.run(cancel, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    (point,) = training(tmp_path)
    check_saved(point)
    assert len(list((tmp_path / SWEEP).glob("*/status.json"))) == 1, "no other was started"
    assert "not started: 2; the same command starts them" in output


ANSWERS = {"scontrol": "echo 'KillWait = 100 sec'", "squeue": "echo COMPLETING"}


def in_a_job(tmp_path: Path, node: int) -> dict[str, str]:
    """The environment of `srun` in a job of the user's own, and programs that write down what they are told."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("scontrol", "squeue"):
        (programs / name).write_text(f'#!/bin/sh\necho {name} "$@" >> {tmp_path}/asked\n{ANSWERS[name]}\n')
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4242", "SLURM_STEP_ID": "0", "SLURM_NODEID": str(node), "SLURM_ARRAY_TASK_ID": "3"}
    return environment() | job | {"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("node", [pytest.param(0, marks=pytest.mark.exhaustive), 1])
def test_points_inside_a_job_of_the_users_own_are_not_that_job(tmp_path, node):
    lines = ["hydra.launcher.parallel_points=1", "seed=1,2", f"max_steps={2 if node else 4000}"]
    with started(tmp_path, *lines, env=in_a_job(tmp_path, node)) as process:
        if not node:
            for killed in (1, 2):
                point = wait_for_training(process, tmp_path, killed)[-1]
                os.kill(status_of(point)["roles"]["trainer/0"]["pid"], signal.SIGKILL)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == (0 if node else 1), output
    points = sorted((tmp_path / SWEEP).glob("seed*"))
    assert [read_state(point) for point in points] == ["done" if node else "failed"] * 2
    for point in points:
        end = read_attempts(point)[-1]
        assert (end["job"], end["requeued"], end["class"]) == (None, False, None if node else "node")
    asked = (tmp_path / "asked").read_text() if (tmp_path / "asked").exists() else ""
    assert "requeue" not in asked


def test_the_end_of_the_job_around_a_sweep_leaves_its_points_the_time_to_save(tmp_path):
    """SLURM may tell the sweep and all processes below it; KillWait is what they have."""
    with started(tmp_path, "hydra.launcher.parallel_points=1", "seed=1,2", env=in_a_job(tmp_path, 0)) as process:
        (point,) = wait_for_training(process, tmp_path, 1)
        agent = status_of(point)["root_pid"]
        for pid in (agent, process.pid):
            os.kill(pid, signal.SIGTERM)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 143, output
    check_saved(point)
    assert "squeue --noheader --jobs=4242" in (tmp_path / "asked").read_text()
    assert (point / "stop.json").exists(), "the deadline was told"


@pytest.mark.parametrize("at_a_time", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_equal_sweeps_at_the_same_instant_run_each_point_once(tmp_path, at_a_time):
    lines = ["max_steps=2", f"hydra.launcher.parallel_points={at_a_time}", "seed=1,2"]
    with started(tmp_path, *lines) as one, started(tmp_path, *lines) as other:
        outputs = [process.communicate(timeout=280)[0] for process in (one, other)]
        assert [one.returncode, other.returncode] == [0, 0], outputs
    points = sorted((tmp_path / SWEEP).glob("seed*"))
    assert [read_state(point) for point in points] == ["done"] * 2
    assert [len(read_attempts(point)) for point in points] == [1] * 2
    for output in outputs:
        for point in points:
            assert sum(f"{point.name}: {how}" in output for how in ("done", "running or queued already")) == 1, output


def test_a_sweep_that_is_stopped_while_it_waits_for_its_turn_says_for_what(tmp_path):
    lock = tmp_path / SWEEP / SUBMIT_LOCK
    lock.parent.mkdir(parents=True)
    with locked(lock), started(tmp_path, "max_steps=2") as process:
        wait_for(lambda: process.poll() is not None or is_waiting(process.pid, lock), 200)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output
    assert f"waited for another command of this sweep, which holds {lock}" in output
    assert "Traceback" not in output
    assert not list(lock.parent.glob("seed*"))


def is_waiting(pid: int, lock: Path) -> bool:
    return str(lock) in {file.path for file in psutil.Process(pid).open_files()}


def test_points_one_after_another_run_the_code_of_their_submission(tmp_path):
    source = copy_checkout(tmp_path / "checkout")
    (source / "shout.py").write_text("from prl.envs.reverse_text import ReverseText as Shout\n")
    mix = "+env.mix={shout: {id: 'shout:Shout', args: {max_chars: 10}}}"
    lines = [*SMALL_RL, "~env", mix, "max_steps=2", "sweep=s", "seed=1,2", "hydra.launcher.parallel_points=1"]
    environment = {**os.environ, "PYTHONPATH": str(source)}
    command = [sys.executable, "-m", "prl.rl", "-m", f"cache_dir={tmp_path}/cache", *lines]
    process = subprocess.Popen(command, cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not list(source.glob("outputs/sweeps/s/*/status.json")):
        assert process.poll() is None, process.communicate()[0].decode()
        time.sleep(0.05)
    for name in ("prl/trainer/loops/rl_loop.py", "prl/orchestrator/loop.py", "shout.py", "prl/runtime/agent.py"):
        with (source / name).open("a") as file:
            file.write("\nraise SystemExit('edited')\n")
    output = process.communicate(timeout=240)[0].decode()
    assert process.returncode == 0, output
    assert [status_of(point)["state"] for point in points_of(source)] == ["done", "done"]
