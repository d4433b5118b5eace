"""One job without -m: submitted, dry, or in the words of hydra-submitit-launcher."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from runs import environment
from slurm_cluster import SMALL_RL, TWO_NODES, copy_checkout, steps_of, wait_for_queue

from launch import waiting
from launch.hydra_plugin import register_plugins
from launch.launching import wait_for_server
from launch.reading import settings_of
from launch.session import Session
from launch.settings import LauncherSettings
from launch.submitit_nodes import SubmititLocal, SubmititSlurm
from prl.config.composing import compose_yaml
from prl.config.errors import ConfigError
from prl.config.schema import SlurmConfig
from prl.runtime.agent import PREEMPTED, TIME, has_time_left

DRY = "hydra.launcher.dry_run=true"


def settings(*overrides: str) -> LauncherSettings:
    register_plugins()
    return settings_of(compose_yaml(list(overrides)).hydra.launcher)


def command(directory: Path, *words: str, module: str = "rl") -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", f"prl.{module}", *words]
    return subprocess.run(line, cwd=directory, env=environment(), capture_output=True, text=True, timeout=120)


# --- in the words of hydra-submitit-launcher --------------------------------------------------------------------------


def test_every_key_of_submitit_slurm_reaches_the_job():
    given = {
        "partition": "gpu", "qos": "high", "account": "dev", "constraint": "h200", "gres": "gpu:2", "cpus_per_task": 4,
        "timeout_min": 90, "mem_gb": 7, "signal_delay_s": 33, "array_parallelism": 5, "max_num_timeout": 3,
        "comment": "'for us'", "exclude": "n7", "cpus_per_gpu": 2, "mem_per_gpu": "1G", "mem_per_cpu": "2G",
        "setup": "[module load x]", "name": "mine", "nodes": 1, "gpus_per_node": 2,
        "additional_parameters": "{mail-type: END, exclusive: true}",
    }  # fmt: skip
    found = settings("hydra/launcher=submitit_slurm", *(f"hydra.launcher.{key}={given[key]}" for key in given))
    lines = ("--comment='for us'", "--exclude=n7", "--cpus-per-gpu=2", "--mem-per-gpu=1G", "--mem-per-cpu=2G")
    assert found == LauncherSettings(
        mode="slurm",
        array_parallelism=5,
        asked={"gpus_per_node": 2},
        slurm=SlurmConfig(
            partition="gpu",
            qos="high",
            account="dev",
            constraint="h200",
            gres="gpu:2",
            cpus_per_task=4,
            time=90,
            mem="7G",
            signal_delay_s=33,
            max_retries=2,
            max_timeouts=3,
            job_name="mine",
            setup=("module load x",),
            sbatch=(*lines, "--mail-type=END", "--exclusive"),
        ),
    )
    keys = set(SubmititSlurm.__dataclass_fields__) - {"_target_", "dry_run", "retry_failed"}
    told_elsewhere = {"submitit_folder", "tasks_per_node", "gpus_per_task", "stderr_to_stdout"}
    assert keys == set(given) | told_elsewhere


def test_what_submitit_slurm_leaves_unsaid_is_as_that_launcher_has_it():
    found = settings("hydra/launcher=submitit_slurm")
    assert (found.slurm.time, found.slurm.max_timeouts, found.array_parallelism, found.asked) == (60, 0, 256, {})
    assert (found.slurm.max_retries, found.slurm.job_name) == (settings().slurm.max_retries, "rl")


def test_submitit_local_runs_here_and_no_longer_than_it_may():
    found = settings("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=7", DRY)
    assert found == LauncherSettings(mode="local", timeout_min=7, dry_run=True)
    assert set(SubmititLocal.__dataclass_fields__) <= set(SubmititSlurm.__dataclass_fields__)


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["hydra/launcher=submitit_slurm", "hydra.launcher.tasks_per_node=2"], "tasks_per_node"),
        (["hydra/launcher=submitit_slurm", "hydra.launcher.gpus_per_task=1"], "gpus_per_task"),
        (["hydra/launcher=submitit_local", "hydra.launcher.submitit_folder=/x"], "submitit_folder"),
        (["hydra/launcher=submitit_slurm", "+hydra.launcher.timeout=5"], "hydra.launcher.timeout"),
        (["hydra/launcher=basic"], ""),
    ],
)
def test_a_key_that_no_point_could_follow_is_refused_by_name(overrides, where):
    with pytest.raises(ConfigError) as refused:
        settings(*overrides)
    (violation,) = refused.value.violations
    assert where in violation.where


# --- how often a job may run out of time ------------------------------------------------------------------------------


def test_the_end_of_the_time_is_counted_and_preemption_is_not(monkeypatch):
    attempts = [{"warned": TIME}, {"warned": PREEMPTED}, {"class": "node"}, {"warned": TIME}]
    assert has_time_left(attempts)
    monkeypatch.setenv("PRL_MAX_TIMEOUTS", "1")
    assert has_time_left(attempts[:1])
    assert not has_time_left(attempts)
    assert has_time_left(attempts[:3])
    monkeypatch.setenv("PRL_MAX_TIMEOUTS", "2")
    assert has_time_left(attempts)


# --- one job ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("job", ["rl", "sft", "eval", "bench"])
def test_a_dry_run_of_one_job_writes_its_script_and_starts_nothing(tmp_path, job):
    # an empty directory is as good as none, and the same command comes again
    (tmp_path / "mine").mkdir()
    words = ["hydra/launcher=slurm", DRY, "output_dir=mine", "slurm.job_name=mine", "slurm.partition=gpu"]
    words += ["slurm.max_timeouts=3"]
    for _ in range(2):
        done = command(tmp_path, *words, module=job)
        assert done.returncode == 0, done.stderr
    (point,) = json.loads((tmp_path / "mine/sweep.json").read_text())["points"]
    assert point["dir"] == "."
    script = (tmp_path / "mine/slurm/1.sbatch").read_text()
    assert "#SBATCH --job-name=mine\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert "export PRL_MAX_TIMEOUTS=3\n" in script
    assert (tmp_path / "mine/slurm/1.points").read_text() == f"{tmp_path}/mine\n"
    assert not (tmp_path / "mine/status.json").exists()
    other = command(tmp_path, *words, "seed=1", module=job)
    assert other.returncode == 2
    assert "belongs to a different run" in other.stderr


@pytest.mark.slow
def test_one_job_that_is_refused_leaves_nothing(tmp_path):
    for words in (
        ["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2", DRY],
        ["hydra/launcher=slurm", "slurm.time=1", DRY],
        ["hydra/launcher=slurm", "slurm.template_path=/nowhere", DRY],
        ["hydra/launcher=slurm", "output_dir=/proc/x", DRY],
    ):
        done = command(tmp_path, *words)
        assert done.returncode == 2, done.stdout
        assert "  do:    " in done.stderr
        assert not any(tmp_path.glob("outputs/*"))


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
def test_one_job_from_a_checkout_trains_on_slurm(tmp_path):
    source = copy_checkout(tmp_path / "checkout")
    words = ["hydra/launcher=submitit_slurm", "hydra.launcher.partition=main", *SMALL_RL, "max_steps=2"]
    line = [sys.executable, "-m", "prl.rl", *words, "output_dir=mine"]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    again = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=120)
    assert "mine: running or queued already" in again.stderr
    assert (source / "mine/roles/trainer.yaml").exists()
    seen = command(source, "mine", module="status").stdout
    assert "mine" in seen
    wait_for_queue()
    assert steps_of(source / "mine") == [1, 2]
    assert json.loads((source / "mine/status.json").read_text())["state"] == "done"
    (job,) = json.loads((source / "mine/sweep.json").read_text())["submissions"]
    assert command(source, "mine", module="status").stdout.startswith("mine: done, step 2/2\n")
    assert (source / f"mine/slurm/{job['job_id']}.log").read_text()
    compared = command(source, "mine", module="compare")
    assert compared.returncode == 0, compared.stderr


def test_who_waits_for_a_server_is_told_its_addresses_and_not_sooner(tmp_path, monkeypatch):
    """A status between the state and the addresses is none to go by."""
    seen = [[], [], ["http://node:1"]]
    status = lambda path: {"state": "running", "updated": time.time(), "urls": seen.pop(0)}  # noqa: E731
    monkeypatch.setattr(waiting, "read_status", status)
    monkeypatch.setattr(waiting, "queued_points", lambda path: {path})
    monkeypatch.setattr(waiting, "SERVER_POLL_S", 0.01)
    assert waiting.urls_when_serving(tmp_path) == ["http://node:1"]


@pytest.mark.slow
def test_who_waits_for_a_server_that_fails_is_told_why_and_what_to_do(tmp_path, capsys, monkeypatch):
    """The agent that its job would run fails as it does there; that the job has left the queue is all that is made."""
    path, missing = tmp_path / "serve", tmp_path / "nope"
    words = ["-cn", "inference", "--freeze", f"model.path={missing}", f"output_dir={path}", "deployment.device=cpu"]
    frozen = command(tmp_path, *words, module="plan")
    assert frozen.returncode == 0, frozen.stderr
    (tmp_path / "1.points").write_text(f"{path}\n")
    job = [sys.executable, "-m", "prl.runtime.agent", "--list", str(tmp_path / "1.points")]
    environ = environment() | {"HF_HUB_OFFLINE": "1"}
    assert subprocess.run(job, cwd=tmp_path, env=environ, capture_output=True, timeout=120, check=False).returncode == 2
    monkeypatch.setattr(waiting, "queued_points", lambda path: set())
    session = Session(lambda config: 0, "inference", False)
    wait_for_server(session, path)
    told = capsys.readouterr().err
    assert session.exit_code == 1
    assert re.search(rf"it does not serve: inference/0 failed, class config: .*{missing}", told), told
    assert f"where: model.path={missing}" in told
    assert re.search(r"^  do: +.*model\.path=", told, re.M), told
    assert f"python -m prl.status {path}" in told


def answer(url: str, key: str | None) -> int:
    request = urllib.request.Request(f"{url}/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize(
    ("layout", "servers"),
    [
        ([], 1),
        ([*TWO_NODES, "deployment.num_infer_nodes=2"], 4),
        ([*TWO_NODES, "deployment.num_infer_nodes=2", "inference.router.type=builtin"], 1),
    ],
    ids=["one node", "two nodes", "two nodes behind a router"],
)
def test_a_server_on_slurm_tells_where_it_serves(tmp_path, layout, servers):
    source = copy_checkout(tmp_path / "checkout")
    words = ["hydra/launcher=slurm", "output_dir=serve", f"cache_dir={tmp_path}/cache", *layout]
    line = [sys.executable, "-m", "prl.inference", *words]
    done = subprocess.run(line, cwd=source, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    urls = re.findall(r"^serving at (http\S+)$", done.stdout, re.MULTILINE)
    assert len(set(urls)) == servers
    file = source / "serve/api_key"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    key = file.read_text().strip()
    assert f"in {file}," in done.stdout
    assert [answer(url, key) for url in urls] == [200] * servers
    assert [answer(url, None) for url in urls] == [401] * servers
    seen = command(source, "serve", module="status").stdout
    assert all(f"serves at {url}" in seen for url in urls)
    (job,) = json.loads((source / "serve/sweep.json").read_text())["submissions"]
    assert key not in (source / f"serve/slurm/{job['job_id']}.log").read_text()
    cancelled = command(source, "serve", module="cancel")
    assert cancelled.returncode == 0, cancelled.stderr
    wait_for_queue()
    assert not file.exists()
