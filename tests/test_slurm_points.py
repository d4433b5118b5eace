"""Points of every job on a real SLURM: RL and its comparison, benchmarks, a time limit, what a site may ask for."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from runs import SMALL as SMALL_RL
from slurm_cluster import ask, points_of, states, status_of, steps_of, submit, sweep_of, wait_for_queue, wait_until

from prl.runtime.agent import read_attempts

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(900), pytest.mark.usefixtures("slurm")]


def run(directory, job, *overrides):
    """Like `submit`, without the overrides that only `prl.sft` knows."""
    lines = [f"cache_dir={directory}/cache", *overrides]
    command = [sys.executable, "-m", f"prl.{job}", "-m", "hydra/launcher=slurm", "sweep=s", *lines]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_sweep_of_rl_is_followed_and_compared(tmp_path):
    run(tmp_path, "rl", *SMALL_RL, "max_steps=3", "eval.interval=1", "seed=1,2")
    sweep, seen = str(tmp_path / "outputs/sweeps/s"), set()
    while ask("squeue", "--noheader"):
        seen |= {line.split()[1] for line in ask(sys.executable, "-m", "prl.status", sweep).splitlines()[1:3]}
    assert seen <= {"queued", "starting", "running", "stopping", "done"}
    assert set(states(tmp_path).values()) == {"COMPLETED"}
    table = ask(sys.executable, "-m", "prl.status", sweep).splitlines()
    assert [line.split()[1:3] for line in table[1:3]] == [["done", "3/3"]] * 2
    compared = ask(sys.executable, "-m", "prl.compare", sweep, "--json", str(tmp_path / "compared.json"))
    assert "s: 2 points (2 done)" in compared
    groups = json.loads((tmp_path / "compared.json").read_text())["groups"]
    points = [point for group in groups for point in group["points"]]
    assert [point["state"] for point in points] == ["done", "done"]
    assert (tmp_path / "outputs/sweeps/s/compare.png").exists()


@pytest.mark.exhaustive
def test_benchmarks_are_points_like_others(tmp_path):
    quick = ["bench.warmup_steps=1", "bench.steps=2", "bench.doc_len=64", "debug.num_threads=1"]
    run(tmp_path, "bench", *quick, "bench.target=trainer_rl,inference")
    wait_for_queue()
    assert set(states(tmp_path).values()) == {"COMPLETED"}
    results = [json.loads((point / "result.json").read_text()) for point in points_of(tmp_path)]
    assert [result["target"] for result in results] == ["trainer_rl", "inference"]
    assert results[0]["result"]["tokens_per_s_per_gpu"] > 0
    assert [status_of(point)["state"] for point in points_of(tmp_path)] == ["done", "done"]
    before = sweep_of(tmp_path)["submissions"]
    run(tmp_path, "bench", *quick, "bench.target=trainer_rl,inference")
    assert sweep_of(tmp_path)["submissions"] == before


def test_a_run_longer_than_its_time_limit_saves_and_goes_on(tmp_path):
    """A minute at a time. SLURM may warn half a minute early, so the first warning comes after 15 to 45 s: on a busy
    machine before the first step, and then it is one of the next attempts that saves one.
    """
    done = submit(  # more steps than any machine does in a minute
        tmp_path,
        "max_steps=20000",
        "ckpt.interval=10000",
        "seed=1",
        "slurm.time=1",
        "slurm.signal_delay_s=15",
        "slurm.max_retries=9",
    )
    assert done.returncode == 0, done.stderr
    (point,) = points_of(tmp_path)
    job = sweep_of(tmp_path)["submissions"][0]["job_id"]

    def warned():
        return [row for row in read_attempts(point) if row.get("requeued")]

    wait_until(lambda: any(row["step"] for row in warned()), 500, "an attempt that saves")
    assert all(row["class"] is None for row in warned())
    saved = warned()[-1]["step"]
    assert saved < 20000
    wait_until(lambda: len(steps_of(point)) >= saved + 20, 120, "twenty steps of the attempt after it")
    ask("scancel", job)
    wait_for_queue()
    steps = steps_of(point)
    assert steps == list(range(1, len(steps) + 1))


def test_what_a_site_may_ask_for_reaches_the_job(tmp_path):
    """Account, QOS, node features, more lines, and setup lines; a srun of the site's own knows containers."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "srun").write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" > {tmp_path}/srun.args\nargs=()\n'
        'for word; do [[ $word == --container-image=* ]] || args+=("$word"); done\nexec /usr/bin/srun "${args[@]}"\n'
    )
    (programs / "srun").chmod(0o755)
    directory = tmp_path / "a b"
    directory.mkdir()
    done = submit(
        directory,
        "hydra/launcher=slurm_h200",
        "slurm.gres=gpu:1",
        "deployment=colocated",
        "seed=1",
        "slurm.account=dev",
        "slurm.qos=high",
        "slurm.time=5",
        "slurm.sbatch=['--cpus-per-gpu=12','--mem-per-gpu=220G','--comment=\"asked for\"','--nice=5']",
        f"slurm.setup=['export NCCL_SOCKET_IFNAME=lo GLOO_SOCKET_IFNAME=lo','export PATH={programs}:$PATH']",
        "slurm.container=/images/prl torch.sqsh",
    )
    assert done.returncode == 0, done.stderr
    job = sweep_of(directory)["submissions"][0]["job_id"]
    shown = dict(word.split("=", 1) for word in ask("scontrol", "-o", "show", "job", job).split() if "=" in word)
    assert "Comment=asked for" in ask("scontrol", "-o", "show", "job", job)
    asked = {key: shown[key] for key in ("Account", "QOS", "Features", "TimeLimit", "CpusPerTres", "MemPerTres")}
    assert asked == {
        "Account": "dev",
        "QOS": "high",
        "Features": "h200",
        "TimeLimit": "00:05:00",
        "CpusPerTres": "gres:gpu:12",
        "MemPerTres": "gres:gpu:225280",
    }
    wait_for_queue()
    assert states(directory) == {job: "COMPLETED"}
    words = (tmp_path / "srun.args").read_text().splitlines()
    assert words[:2] == ["--kill-on-bad-exit=1", "--container-image=/images/prl torch.sqsh"]
