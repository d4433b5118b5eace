"""Sweeps on a real SLURM: arrays by shape, resume, requeue, cancellation; supervised runs where there are many."""

from __future__ import annotations

import concurrent.futures
import sys
import time

import pytest
from slurm_cluster import (
    Held,
    agent_of,
    ask,
    points_of,
    processes_in,
    states,
    status_of,
    steps_of,
    submit,
    sweep_of,
    wait_for_queue,
    wait_until,
    wait_until_stopping,
)

from prl.runtime.agent import read_attempts
from prl.runtime.directory.hours import read_hours
from prl.runtime.directory.ledger import read_failures

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm")]

WITHOUT_TASKS = """
from prl.envs.protocol import Environment


class EmptyHanded(Environment):
    def tasks(self, split):
        return []

    def reward(self, task, messages):
        return 0.0
"""
STEPS, MIDDLE = 14, "optimizer step:7"  # between two checkpoints, and some steps before the end
LONG = [f"max_steps={STEPS}", "ckpt.interval=2", "slurm.signal_delay_s=20"]


def test_two_shapes_are_two_arrays_and_a_second_call_submits_nothing(tmp_path):
    grid = ["deployment.num_train_gpus=1,2", "seed=1,2", "max_steps=2"]
    done = submit(tmp_path, *grid)
    assert done.returncode == 0, done.stderr
    submissions = sweep_of(tmp_path)["submissions"]
    assert [len(job["points"]) for job in submissions] == [2, 2]
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"COMPLETED"}
    assert len(states(tmp_path)) == 4
    assert [status_of(point)["state"] for point in points_of(tmp_path)] == ["done"] * 4
    assert [steps_of(point) for point in points_of(tmp_path)] == [[1, 2]] * 4
    again = submit(tmp_path, *grid)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done already") == 4
    assert sweep_of(tmp_path)["submissions"] == submissions


def test_equal_commands_at_the_same_instant_submit_once(tmp_path):
    held = "slurm.sbatch=['--hold']"  # in the queue until the slowest of them has looked there
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: submit(tmp_path, "seed=1,2", "max_steps=1", held), range(3)))
    assert [one.returncode for one in done] == [0] * 3, [one.stderr for one in done]
    assert [len(job["points"]) for job in sweep_of(tmp_path)["submissions"]] == [2]
    assert sum(one.stderr.count("running or queued already") for one in done) == 4
    ask("scancel", sweep_of(tmp_path)["submissions"][0]["job_id"])
    wait_for_queue()


def test_a_killed_agent_costs_an_attempt_of_one_point_which_resumes(tmp_path):
    """Its batch script outlives it, tells its end and requeues the job."""
    held = Held(MIDDLE, tmp_path / "moment", elements=2)
    done = submit(tmp_path, *LONG, "seed=1,2", env=held.env)
    assert done.returncode == 0, done.stderr
    victim, other = points_of(tmp_path)
    held.wait()
    agent_of(victim, tmp_path).kill()
    held.go()
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"COMPLETED"}
    for point, attempts in ((victim, 2), (other, 1)):
        assert (status_of(point)["state"], len(read_attempts(point))) == ("done", attempts)
        assert steps_of(point) == list(range(1, STEPS + 1))
    (told,) = read_failures(victim.parent)
    assert (told["point"], told["class"], told["requeued"]) == (victim.name, "node", True)
    assert "the root process was killed" in told["message"]
    killed, resumed = read_hours(victim, None)
    assert (killed.is_over, resumed.is_over) == (True, True)
    assert killed.began < read_attempts(victim)[0]["started"] < killed.updated < resumed.began


@pytest.mark.parametrize("how", ["warning", pytest.param("requeue", marks=pytest.mark.exhaustive)])
def test_an_element_that_is_sent_back_to_the_queue_resumes_without_gap_or_double_step(tmp_path, how):
    """The last one of an array, whose own number is that of the whole: the others are left alone."""
    held = Held(MIDDLE, tmp_path / "moment", elements=2)
    done = submit(tmp_path, *LONG, "seed=1,2", env=held.env)
    assert done.returncode == 0, done.stderr
    other, point = points_of(tmp_path)
    array = sweep_of(tmp_path)["submissions"][0]["job_id"]
    held.wait()
    command = ["scontrol", "requeue"] if how == "requeue" else ["scancel", "--signal=USR2"]
    ask(*command, f"{array}_1")
    wait_until_stopping(point)
    held.go()
    wait_until(lambda: status_of(point).get("attempt", 0) == 2, 120, "a second attempt")
    wait_for_queue()
    assert states(tmp_path) == {f"{array}_0": "COMPLETED", f"{array}_1": "COMPLETED"}
    for one, attempts in ((other, 1), (point, 2)):
        assert status_of(one)["state"] == "done"
        assert steps_of(one) == list(range(1, STEPS + 1))
        assert len(read_attempts(one)) == attempts
    (first, second), (once,) = read_hours(point, None), read_hours(other, None)
    assert [(a.job, a.devices, a.is_over) for a in (first, second, once)] == [
        *[(f"{array}_1", 2, True)] * 2, (f"{array}_0", 2, True)
    ]  # fmt: skip
    assert second.began > first.updated  # in the queue nobody pays


def test_preemption_saves_and_resumes(tmp_path):
    where = ["slurm.partition=preemptible", "slurm.sbatch=['--exclusive']"]
    held = Held(MIDDLE, tmp_path / "moment")
    done = submit(tmp_path, *LONG, "seed=1", *where, env=held.env)
    assert done.returncode == 0, done.stderr
    (point,) = points_of(tmp_path)
    held.wait()
    ask("sbatch", "--nodes=2", "--exclusive", f"--output={tmp_path}/other.log", "--wrap=srun sleep 3")
    wait_until_stopping(point)
    held.go()
    wait_until(lambda: status_of(point).get("attempt", 0) == 2, 120, "a second attempt")
    wait_for_queue()
    assert status_of(point)["state"] == "done"
    assert steps_of(point) == list(range(1, STEPS + 1))


@pytest.mark.exhaustive
def test_scancel_leaves_no_process(tmp_path):
    done = submit(tmp_path, *LONG, "max_steps=4000", "deployment.num_train_gpus=2", "seed=1,2")
    assert done.returncode == 0, done.stderr
    points = points_of(tmp_path)
    wait_until(lambda: all(status_of(point).get("step", 0) >= 2 for point in points), 120, "step 2")
    assert len(processes_in(tmp_path)) >= 4
    ask("scancel", sweep_of(tmp_path)["submissions"][0]["job_id"])
    wait_until(lambda: not processes_in(tmp_path), 90, "the end of all processes")
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"CANCELLED by 0"}


@pytest.mark.parametrize("job", ["rl", pytest.param("sft", marks=pytest.mark.exhaustive)])
def test_a_failing_point_is_failed_for_slurm_and_has_a_class(tmp_path, job):
    if job == "rl":  # an environment of the user's own, and what of it only the job can see
        (tmp_path / "empty_handed.py").write_text(WITHOUT_TASKS)
        wrong, fails = ["algo=grpo,nope"], ["+env.mix={empty: {id: 'empty_handed:EmptyHanded'}}"]
    else:
        (tmp_path / "broken.jsonl").write_text('{"messages": 3}\n')
        wrong, fails = ["+dummy=1"], ["data=jsonl", f"sft.data.source={tmp_path}/broken.jsonl"]
    done = submit(tmp_path, *fails, *wrong, "seed=1,2", job=job)
    assert done.returncode == 2  # nothing is submitted when any point is wrong
    assert not (tmp_path / "outputs").exists()
    done = submit(tmp_path, *fails, "seed=1,2", job=job)
    assert done.returncode == 0, done.stderr
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"FAILED"}
    assert {status_of(point)["failure"]["class"] for point in points_of(tmp_path)} == {"config"}
    failures = read_failures(tmp_path / "outputs/sweeps/s")
    assert {row["job"] for row in failures} == set(states(tmp_path))
    assert {(row["attempt"], row["class"], row["node"][0], row["requeued"]) for row in failures} == {
        (1, "config", "n", False)
    }
    again = submit(tmp_path, *fails, "seed=1,2", job=job)  # nothing was trained: what was in the way may be gone
    assert len(sweep_of(tmp_path)["submissions"]) == 2, again.stderr
    assert "refused before, tried again" in again.stderr
    wait_for_queue()


@pytest.mark.timed
def test_many_points_are_submitted_fast_and_arrays_are_cut(tmp_path):
    ask("scontrol", "update", "PartitionName=main", "State=DOWN")  # nothing is to start
    try:
        started = time.monotonic()
        done = submit(tmp_path, "seed=range(64)")
        elapsed = time.monotonic() - started
        assert done.returncode == 0, done.stderr
        assert [len(job["points"]) for job in sweep_of(tmp_path)["submissions"]] == [64]
        assert elapsed < 5
        more = submit(tmp_path, "seed=range(100,130)", "hydra.launcher.max_array_size=16")
        assert [len(job["points"]) for job in sweep_of(tmp_path)["submissions"]] == [64, 16, 14], more.stderr
        again = submit(tmp_path, "seed=range(64)")
        assert again.stderr.count("running or queued already") == 64
        sweep = str(tmp_path / "outputs/sweeps/s")
        assert states_told(sweep) == ["queued"] * 94
        ask(sys.executable, "-m", "prl.cancel", str(points_of(tmp_path)[3]))
        assert sorted(states_told(sweep)) == ["missing", *["queued"] * 93]
        ask(sys.executable, "-m", "prl.cancel", sweep)
        wait_until(lambda: not ask("squeue", "--noheader"), 30, "an empty queue")
    finally:
        ask("scancel", "--user=root")
        ask("scontrol", "update", "PartitionName=main", "State=UP")
        wait_for_queue()


def states_told(sweep):
    """What `prl.status` says of each point."""
    rows = ask(sys.executable, "-m", "prl.status", sweep).splitlines()[1:]
    return [line.split()[1] for line in rows if not line.startswith("not started: ")]


def test_what_slurm_refuses_is_told(tmp_path):
    done = submit(tmp_path, "seed=1", "slurm.partition=nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr or "partition" in done.stderr
    assert "Traceback" not in done.stderr
