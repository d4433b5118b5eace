"""Sweeps on a real SLURM: arrays by shape, resume, requeue, cancellation, frozen code. Supervised runs start fast."""

from __future__ import annotations

import sys
import time

import pytest
from slurm_cluster import (
    agent_of,
    ask,
    copy_checkout,
    points_of,
    processes_in,
    states,
    status_of,
    steps_of,
    submit,
    sweep_of,
    wait_for_queue,
    wait_until,
)

from prl.runtime.ledger import read_failures

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.usefixtures("slurm")]

LONG = ["max_steps=40", "seq_len=256", "ckpt.interval=2", "slurm.signal_delay_s=20"]


def test_two_shapes_are_two_arrays_and_a_second_call_submits_nothing(tmp_path):
    grid = ["parallelism.dp_shard=1,2", "seed=1,2", "optim.lr=0.001,0.002"]
    done = submit(tmp_path, *grid)
    assert done.returncode == 0, done.stderr
    submissions = sweep_of(tmp_path)["submissions"]
    assert [len(job["points"]) for job in submissions] == [4, 4]
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"COMPLETED"}
    assert len(states(tmp_path)) == 8
    assert [status_of(point)["state"] for point in points_of(tmp_path)] == ["done"] * 8
    again = submit(tmp_path, *grid)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done already") == 8
    assert sweep_of(tmp_path)["submissions"] == submissions


def test_a_killed_agent_costs_one_point_which_resumes(tmp_path):
    done = submit(tmp_path, *LONG, "seed=1,2")
    assert done.returncode == 0, done.stderr
    victim, other = points_of(tmp_path)
    wait_until(lambda: status_of(victim).get("step", 0) >= 4, 120, "step 4")
    agent_of(victim, tmp_path).kill()
    wait_for_queue()
    assert sorted(states(tmp_path).values()) == ["COMPLETED", "FAILED"]
    assert status_of(other)["state"] == "done"
    again = submit(tmp_path, *LONG, "seed=1,2")
    assert again.returncode == 0, again.stderr
    assert [job["points"] for job in sweep_of(tmp_path)["submissions"][1:]] == [[victim.name]]
    wait_for_queue()
    assert status_of(victim)["state"] == "done"
    assert status_of(victim)["attempt"] == 2
    assert steps_of(victim) == list(range(1, 41))


@pytest.mark.parametrize("how", ["requeue", pytest.param("warning", marks=pytest.mark.exhaustive)])
def test_a_run_that_is_sent_back_to_the_queue_resumes_without_gap_or_double_step(tmp_path, how):
    done = submit(tmp_path, *LONG, "seed=1")
    assert done.returncode == 0, done.stderr
    (point,) = points_of(tmp_path)
    job = sweep_of(tmp_path)["submissions"][0]["job_id"]
    wait_until(lambda: status_of(point).get("step", 0) >= 5, 120, "step 5")
    command = ["scontrol", "requeue", job] if how == "requeue" else ["scancel", "--signal=USR2", job]
    ask(*command)
    wait_until(lambda: status_of(point).get("attempt", 0) == 2, 120, "a second attempt")
    wait_for_queue()
    assert states(tmp_path) == {job: "COMPLETED"}
    assert status_of(point)["state"] == "done"
    assert steps_of(point) == list(range(1, 41))


def test_preemption_saves_and_resumes(tmp_path):
    where = ["slurm.partition=preemptible", "slurm.sbatch=['--exclusive']"]
    done = submit(tmp_path, *LONG, "max_steps=150", "seed=1", *where)
    assert done.returncode == 0, done.stderr
    (point,) = points_of(tmp_path)
    wait_until(lambda: status_of(point).get("step", 0) >= 3, 120, "step 3")
    ask("sbatch", "--nodes=2", "--exclusive", f"--output={tmp_path}/other.log", "--wrap=srun sleep 3")
    wait_until(lambda: status_of(point).get("attempt", 0) == 2, 120, "a second attempt")
    wait_for_queue()
    assert status_of(point)["state"] == "done"
    assert steps_of(point) == list(range(1, 151))


@pytest.mark.exhaustive
def test_scancel_leaves_no_process(tmp_path):
    done = submit(tmp_path, *LONG, "max_steps=4000", "parallelism.dp_shard=2", "seed=1,2")
    assert done.returncode == 0, done.stderr
    points = points_of(tmp_path)
    wait_until(lambda: all(status_of(point).get("step", 0) >= 2 for point in points), 120, "step 2")
    assert len(processes_in(tmp_path)) >= 4
    ask("scancel", sweep_of(tmp_path)["submissions"][0]["job_id"])
    time.sleep(10)
    assert processes_in(tmp_path) == []
    wait_for_queue(30)
    assert set(states(tmp_path).values()) == {"CANCELLED by 0"}


def test_a_failing_point_is_failed_for_slurm_and_has_a_class(tmp_path):
    data = tmp_path / "broken.jsonl"
    data.write_text('{"messages": 3}\n')
    done = submit(tmp_path, "data=jsonl,reverse_text", f"+dummy={data}")
    assert done.returncode == 2  # nothing is submitted when any point is wrong
    assert not (tmp_path / "outputs").exists()
    done = submit(tmp_path, "data=jsonl", f"sft.data.source={data}", "seed=1,2")
    assert done.returncode == 0, done.stderr
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"FAILED"}
    assert {status_of(point)["failure"]["class"] for point in points_of(tmp_path)} == {"config"}
    failures = read_failures(tmp_path / "outputs/sweeps/s")
    assert {row["job"] for row in failures} == set(states(tmp_path))
    assert {(row["attempt"], row["class"], row["node"][0], row["requeued"]) for row in failures} == {
        (1, "config", "n", False)
    }
    again = submit(tmp_path, "data=jsonl", f"sft.data.source={data}", "seed=1,2")
    assert len(sweep_of(tmp_path)["submissions"]) == 1, again.stderr
    assert "retry_failed=true" in again.stderr


def test_edits_after_submission_change_nothing(tmp_path):
    source = copy_checkout(tmp_path / "checkout")
    done = submit(tmp_path, "seed=1", "slurm.sbatch=['--begin=now+8']", source=source)
    assert done.returncode == 0, done.stderr
    (source / "conf/base.yaml").write_text("broken: [")
    (source / "prl/trainer/sft_loop.py").write_text("raise SystemExit('edited')")
    (source / "prl/__init__.py").write_text("raise SystemExit('edited')")
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"COMPLETED"}
    assert steps_of(points_of(tmp_path)[0]) == [1, 2, 3, 4]


@pytest.mark.timed
def test_many_points_are_submitted_fast_and_arrays_are_cut(tmp_path):
    ask("scontrol", "update", "PartitionName=main", "State=DOWN")  # nothing is to start
    try:
        started = time.monotonic()
        done = submit(tmp_path, f"seed=range({64})")
        elapsed = time.monotonic() - started
        assert done.returncode == 0, done.stderr
        assert [len(job["points"]) for job in sweep_of(tmp_path)["submissions"]] == [64]
        assert elapsed < 5
        more = submit(tmp_path, "seed=range(100,130)", "hydra.launcher.max_array_size=16")
        assert [len(job["points"]) for job in sweep_of(tmp_path)["submissions"]] == [64, 16, 14], more.stderr
        again = submit(tmp_path, f"seed=range({64})")
        assert again.stderr.count("running or queued already") == 64
        sweep = str(tmp_path / "outputs/sweeps/s")
        assert states_told(sweep) == ["queued"] * 94
        ask(sys.executable, "-m", "prl.cancel", str(points_of(tmp_path)[3]))
        assert sorted(states_told(sweep)) == ["missing", *["queued"] * 93]
        ask(sys.executable, "-m", "prl.cancel", sweep)
        assert ask("squeue", "--noheader") == ""
    finally:
        ask("scancel", "--user=root")
        ask("scontrol", "update", "PartitionName=main", "State=UP")
        wait_for_queue(30)


def states_told(sweep):
    """What `prl.status` says of each point."""
    return [line.split()[1] for line in ask(sys.executable, "-m", "prl.status", sweep).splitlines()[1:]]


def test_what_slurm_refuses_is_told(tmp_path):
    done = submit(tmp_path, "seed=1", "slurm.partition=nowhere")
    assert done.returncode == 2
    assert "nowhere" in done.stderr or "partition" in done.stderr
    assert "Traceback" not in done.stderr
