"""Whole runs of `python -m prl.rl`: reproducibility, staleness, overlap, faults, resume."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter

import pytest
from runs import (
    SMALL,
    Moment,
    finish,
    kill_root,
    rows,
    run,
    series,
    start,
    wait_for_checkpoint,
    wait_for_step,
    wait_until_gone,
)
from runtime_tree import mount_small_disk, wait_for

from prl.runtime.directory.status_file import read_status

pytestmark = pytest.mark.slow

SYNC = [*SMALL, "algo.max_off_policy_steps=0", "max_steps=6", "eval.interval=3", "ckpt.interval=2"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.fixture(scope="module")
def sync_run(tmp_path_factory, cache):
    """A finished synchronous run, to compare others with."""
    directory = tmp_path_factory.mktemp("sync")
    done = run([*SYNC, cache, f"output_dir={directory}/a"], directory)
    assert done.code == 0, done.output
    return directory / "a"


def test_another_seed_is_another_run(sync_run, cache, tmp_path):
    done = run([*SYNC, cache, "seed=1", "max_steps=1", f"output_dir={tmp_path}/c"], tmp_path)
    assert done.code == 0, done.output
    assert series(tmp_path / "c", "trainer.0")[0] != series(sync_run, "trainer.0")[0]


@pytest.mark.smoke
def test_trainer_and_engine_agree_when_versions_are_equal(sync_run):
    for row in rows(sync_run, "trainer.0"):
        assert 0 < row["mismatch_kl_mean"] < 1e-6
        assert row["mismatch_kl_p999"] < 1e-6


@pytest.mark.smoke
def test_the_same_seed_gives_the_same_run_bit_by_bit_also_over_sigkill_and_resume(sync_run, cache, tmp_path):
    args = [*SYNC, cache, f"output_dir={tmp_path}/d"]
    moment = Moment("optimizer step:6", tmp_path / "moment")
    process = start(args, tmp_path, env=moment.env)
    moment.wait(process)
    wait_for_checkpoint(process, tmp_path / "d", 4)
    kill_root(process)
    wait_until_gone(tmp_path / "d")
    for role in ("orchestrator", "trainer.0"):  # nobody has disturbed it yet
        before = series(tmp_path / "d", role)
        assert before[-1]["step"] >= 4
        assert before == series(sync_run, role)[: len(before)]
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    assert "resuming from the checkpoint of step 4" in done.output
    assert "from the first row of metrics to the last, and what lay between 2 attempts" in done.output
    for role in ("orchestrator", "trainer.0"):
        assert series(tmp_path / "d", role) == series(sync_run, role)  # no gap, no double step


@pytest.mark.exhaustive
def test_corrupt_checkpoint_is_named_and_the_one_before_is_used(sync_run, cache, tmp_path):
    args = [*SYNC, cache, f"output_dir={tmp_path}/e"]
    moment = Moment("optimizer step:6", tmp_path / "moment")
    process = start(args, tmp_path, env=moment.env)
    moment.wait(process)
    wait_for_checkpoint(process, tmp_path / "e", 4)
    kill_root(process)
    wait_until_gone(tmp_path / "e")
    victim = max((tmp_path / "e/checkpoints/step_4").rglob("*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 0xFF
    victim.write_bytes(data)
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    assert victim.name in done.output
    assert "resuming from the checkpoint of step 2" in done.output
    assert series(tmp_path / "e", "trainer.0") == series(sync_run, "trainer.0")


@pytest.mark.exhaustive
def test_sigterm_checkpoints_and_says_so_in_the_exit_code(cache, tmp_path):
    args = [*SMALL, cache, "max_steps=500", "eval.interval=0", "ckpt.interval=0", f"output_dir={tmp_path}/f"]
    process = start(args, tmp_path)
    wait_for_step(process, tmp_path / "f", 3)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143, done.output
    assert json.loads((tmp_path / "f/status.json").read_text())["state"] == "stopped"
    (checkpoint,) = (tmp_path / "f/checkpoints").glob("step_*[0-9]")
    step = int(checkpoint.name.split("_")[1])
    assert step == max(row["step"] for row in rows(tmp_path / "f", "trainer.0"))
    process = start(args, tmp_path)
    wait_for_step(process, tmp_path / "f", step + 2)
    process.send_signal(signal.SIGINT)
    done = finish(process)
    assert done.code == 130, done.output
    steps = [row["step"] for row in rows(tmp_path / "f", "trainer.0")]
    assert steps == list(range(1, len(steps) + 1))


def test_asynchronous_default_respects_the_staleness_bound_and_overlaps(cache, tmp_path):
    args = [cache, "warm_start=none", "max_steps=6", "eval.interval=0", "logging.wandb.mode=disabled"]
    done = run([*args, f"output_dir={tmp_path}/g"], tmp_path)
    assert done.code == 0, done.output
    steps = [row for row in rows(tmp_path / "g", "orchestrator") if "staleness_hist" in row]
    assert len(steps) == 6
    for row in steps:
        assert len(row["staleness_hist"]) == 3  # lags 0, 1 and 2
        assert row["staleness_max"] <= 2
    assert max(row["staleness_max"] for row in steps) > 0
    overlaps = [row["overlap"] for row in rows(tmp_path / "g", "orchestrator") if "overlap" in row]
    print(f"share of the trainer's busy time in which engines generated: {sum(overlaps) / len(overlaps):.2f}")
    assert sum(overlaps) / len(overlaps) > 0.5


def segments():
    return {name for name in os.listdir("/dev/shm") if name.startswith("prl-")}


def test_colocated_takes_turns(cache, tmp_path):
    args = [*SMALL, cache, "deployment=colocated", "weight_transport=shared_memory", "max_steps=4", "eval.interval=2"]
    args += ["debug.keep_rollouts=true"]
    before = segments()
    done = run([*args, f"output_dir={tmp_path}/h"], tmp_path)
    left = segments() - before
    assert done.code == 0, done.output
    written = rows(tmp_path / "h", "orchestrator")
    overlaps = [row["overlap"] for row in written if "overlap" in row]
    assert len(overlaps) == 4
    assert max(overlaps) < 0.01
    assert sum(row.get("engines_to_sleep_s", 0) > 0 for row in written) == 4
    kept = [json.loads(line) for line in (tmp_path / "h/rollouts.jsonl").read_text().splitlines()]
    assert {row["step"] for row in kept} == {1, 2, 3, 4}
    assert all([m["role"] for m in row["messages"]] == ["user", "assistant"] for row in kept)
    wait_for(lambda: not left & segments(), 240)  # those of other runs on this machine are replaced, or end with them


def test_colocated_engines_overlap_where_memory_is_shared_by_a_fraction(cache, tmp_path):
    args = [*SMALL, cache, "deployment=colocated_overlapped", "max_steps=4", "eval.interval=2"]
    done = run([*args, f"output_dir={tmp_path}/o"], tmp_path)
    assert done.code == 0, done.output
    written = rows(tmp_path / "o", "orchestrator")
    overlaps = [row["overlap"] for row in written if "overlap" in row]
    assert len(overlaps) == 4
    assert max(overlaps) > 0.1
    assert max(row["staleness_max"] for row in written if "staleness_max" in row) > 0, "nothing ran ahead"
    plan = json.loads((tmp_path / "o/plan.json").read_text())
    devices = {role["role"]: role["devices"] for role in plan["roles"] if role["devices"]}
    assert devices == {"inference": [0], "trainer": [0]}


def test_several_ranks_and_engines(cache, tmp_path):
    args = [*SMALL, cache, "deployment.num_train_gpus=2", "deployment.num_infer_gpus=2"]
    args += ["max_steps=3", "eval.interval=0"]
    done = run([*args, "env=[reverse_text,countdown]", f"output_dir={tmp_path}/i"], tmp_path)
    assert done.code == 0, done.output
    seen = {key for row in rows(tmp_path / "i", "orchestrator") for key in row if key.startswith("reward/")}
    assert seen == {"reward/reverse_text", "reward/countdown"}


def test_misbehaving_rewards_cost_rollouts_not_the_run(cache, tmp_path):
    small = [arg for arg in SMALL if not arg.startswith("env.mix")]
    env = ["~env", "+env.mix={flaky: {id: 'flaky_env:FlakyEnv'}}", "env.reward_timeout_s=1"]
    args = [*small, cache, *env, "max_steps=3", "eval.interval=3", f"output_dir={tmp_path}/j"]
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    last = [row for row in rows(tmp_path / "j", "orchestrator") if "failed_rollouts" in row][-1]
    assert last["failed_rollouts"] > 0
    assert last["last_rollout_error"]
    evaluations = [row for row in rows(tmp_path / "j", "orchestrator") if "eval/reward" in row]
    lacking = {row["step"]: row["eval/failed_rollouts"] for row in evaluations}[3]
    assert lacking > 0
    assert f"count as nothing: {lacking} at step " in done.output or f", {lacking} at step 3" in done.output


@pytest.mark.exhaustive
def test_a_sweep_of_two_points_runs_both(cache, tmp_path):
    args = [*SMALL, cache, "max_steps=2", "eval.interval=0", "sweep=pair"]
    done = run(["-m", *args, "memory=none,tight"], tmp_path)
    assert done.code == 0, done.output
    points = sorted((tmp_path / "outputs/sweeps/pair").glob("memory-*"))
    assert [p.name.rsplit("-", 1)[0] for p in points] == ["memory-none", "memory-tight"]
    losses = [[row["loss"] for row in rows(p, "trainer.0")] for p in points]
    assert [len(series_) for series_ in losses] == [2, 2]


def test_missing_dataset_is_a_user_error_without_a_run_directory(cache, tmp_path):
    done = run([cache, "data=jsonl", "sft.data.source=nowhere.jsonl"], tmp_path, "prl.sft")
    assert done.code == 2, done.output
    assert "nowhere.jsonl" in done.output
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").iterdir())


@pytest.fixture
def disk(tmp_path):
    yield from mount_small_disk(tmp_path / "disk", "size=45m")


def test_full_disk_while_checkpointing_keeps_the_older_checkpoint(cache, tmp_path, disk):
    args = [*SMALL, cache, "max_steps=40", "eval.interval=0", "ckpt.interval=2"]
    args += ["ckpt.keep=20", "weight_transport=shared_memory"]  # nothing but checkpoints fills the disk
    done = run([*args, f"output_dir={disk}/k"], tmp_path)
    assert done.code == 2, done.output
    assert "disk is full" in done.output
    assert "survives" in done.output
    complete = sorted((disk / "k/checkpoints").glob("step_*[0-9]"))
    assert complete
    assert all((c / "manifest.json").exists() for c in complete)


def test_a_cache_that_can_only_be_read_serves_what_it_holds(tmp_path, disk):
    args = [*SMALL, f"cache_dir={disk}", "max_steps=1", "eval.interval=0"]
    made = run([*args, f"output_dir={tmp_path}/n"], tmp_path)
    assert made.code == 0, made.output
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    again = run([*args, "seed=1", f"output_dir={tmp_path}/o"], tmp_path)
    assert again.code == 0, again.output
    other = run([*args, "model.init_seed=9", f"output_dir={tmp_path}/p"], tmp_path)
    assert other.code == 2
    assert f"cache_dir={disk}" in other.output
    assert not (tmp_path / "p").exists()


def test_the_rollouts_in_flight_settle_near_what_the_engine_holds(cache, tmp_path):
    """Twelve times as many rollouts as it can decode together, at first."""
    args = [*SMALL, cache, "max_steps=6", "eval.interval=0", "inference.sampling.max_tokens=24"]
    args += ["inference.max_num_seqs=8", "inference.concurrency.mode=adaptive", "inference.concurrency.start=96"]
    args += ["inference.concurrency.interval_s=0.1"]
    done = run([*args, f"output_dir={tmp_path}/m"], tmp_path)
    assert done.code == 0, done.output
    steps = [row for row in rows(tmp_path / "m", "orchestrator") if "concurrency_limit" in row]
    assert [row["step"] for row in steps] == list(range(1, 7))
    print([row["concurrency_limit"] for row in steps])
    assert all(4 <= row["concurrency_limit"] <= 12 for row in steps[2:])
    assert max(row["requests_waiting"] for row in steps) > 8
    late = [row for row in steps[3:] if "kv_cache_usage" in row]
    assert late
    assert max(row["requests_waiting"] for row in late) < 4
    assert max(row["kv_cache_usage"] for row in late) > 0.7
    assert sum(row["preemptions"] + row["missed_looks"] + row["aborted_requests"] for row in steps) == 0


# --- engines that die -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engines", "transport"),
    [
        pytest.param(1, "shared_memory", id="one", marks=pytest.mark.exhaustive),
        pytest.param(1, "tcp", id="one tcp", marks=pytest.mark.exhaustive),
        pytest.param(2, "filesystem", id="two", marks=pytest.mark.exhaustive),
        pytest.param(1, "nccl", id="one nccl"),  # over gloo where there are no GPUs
        pytest.param(2, "nccl", id="two nccl", marks=pytest.mark.exhaustive),
    ],
)
def test_a_killed_engine_comes_back_and_nothing_is_trained_twice(cache, tmp_path, engines, transport):
    args = [*SMALL, cache, f"deployment.num_infer_gpus={engines}", f"weight_transport={transport}", "max_steps=14"]
    args += ["eval.interval=0", "debug.keep_rollouts=true", "optim.lr=0.01", f"output_dir={tmp_path}/l"]
    moment = Moment(f"request:{120 // engines}", tmp_path / "moment")  # of 448
    process = start(args, tmp_path, env=moment.env)
    engine = moment.wait(process)
    deaths = 2 if engines == 1 else 1  # the second on its way back
    os.kill(engine, signal.SIGKILL)
    if deaths == 2:
        wait_for(lambda: read_status(tmp_path / "l")["roles"]["inference/0"]["restarts"] == 1)
        os.kill(read_status(tmp_path / "l")["roles"]["inference/0"]["pid"], signal.SIGKILL)
    done = finish(process)
    assert done.code == 0, done.output
    for number in range(1, deaths + 1):
        assert re.search(rf"inference/\d ended \(killed by SIGKILL from outside\); restart {number} of 3", done.output)
    trained = rows(tmp_path / "l", "trainer.0")
    assert [row["step"] for row in trained] == list(range(1, 15))
    steps = [row for row in rows(tmp_path / "l", "orchestrator") if "staleness_hist" in row]
    assert [row["step"] for row in steps] == list(range(1, 15))
    assert (steps[-1]["engine_restarts"], steps[-1]["failed_rollouts"]) == (deaths, 0)
    assert max(row["staleness_max"] for row in steps) <= 2
    kept = [json.loads(line) for line in (tmp_path / "l/rollouts.jsonl").read_text().splitlines()]
    assert max(Counter(row["group"] for row in kept).values()) == 4, "a group was trained twice"
    print(f"{engines} engines, {transport}: {steps[-1]['retried_requests']} requests were asked again")
    assert steps[-1]["retried_requests"] > 0
