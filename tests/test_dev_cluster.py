"""The development cluster is a SLURM like others: nodes, arrays, accounting, signals, requeue, preemption."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slurm_cluster import ask, wait_until

from launch import dev_cluster_files
from launch.dev_cluster import DevCluster, environment_of, name_of, processes_of_jobs
from prl.config.errors import UserError

pytestmark = [pytest.mark.slow, pytest.mark.slurm, pytest.mark.timeout(600)]

SOON_S = 90  # on a busy machine; what is waited for takes a second or two

# Writes to JOB.said what it starts as and which signals it gets; a SIGTERM ends it, of the first start the Nth.
TASK = """\
import os, signal, sys, time
restart = os.environ.get("SLURM_RESTART_COUNT", "0")
left = [int(sys.argv[1]) if restart == "0" else 1]
def say(word):
    with open(os.environ["SLURM_JOB_ID"] + ".said", "a") as file:
        print(word, file=file)
def hear(number, frame):
    say(signal.Signals(number).name)
    left[0] -= number == signal.SIGTERM
    if not left[0]:
        sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, hear)
say("start " + restart)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True)
def _no_job_is_left(slurm):
    yield
    for options in (["--signal=KILL"], ["--signal=KILL", "--full"], []):
        ask("scancel", *options, f"--user={os.getuid()}")
    wait_until(lambda: not ask("squeue", "--noheader"), SOON_S, "an empty queue")


def sbatch(directory: Path, script: str, *options: str) -> str:
    """Submit; the job's output is DIRECTORY/JOB.out. Returns the job's id."""
    path = directory / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    where = [f"--output={directory}/%j.out", "--open-mode=append", f"--chdir={directory}"]
    return ask("sbatch", "--parsable", *where, *options, str(path))


def output(directory: Path, job: str) -> str:
    """Of the batch script, and of what it runs."""
    return (directory / f"{job}.out").read_text()


def said(directory: Path, job: str) -> list[str]:
    """By tasks: what they print may be lost when srun dies before them."""
    path = directory / f"{job}.said"
    return path.read_text().splitlines() if path.exists() else []


def wait_for_end(job: str, limit_s: float = 120) -> None:
    listing = ["squeue", "--noheader", f"--user={os.getuid()}", f"--jobs={job}"]
    wait_until(lambda: not ask(*listing), limit_s, f"end of {job}")


def accounting(job: str, *options: str) -> list[str]:
    """`ID|STATE|CODE` of the job, or of each element of the array."""
    return ask("sacct", *options, "-X", "-n", "-P", "-o", "jobid,state,exitcode", "-j", job).splitlines()


def task(directory: Path, terms: int = 1) -> str:
    path = directory / "task.py"
    path.write_text(TASK)
    return f"srun {sys.executable} {path} {terms}"


def test_sinfo_shows_two_nodes_of_eight_gpus():
    nodes = ask("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %G %P").splitlines()
    assert [line.split() for line in nodes] == [["n0", "gpu:8", "main*"], ["n1", "gpu:8", "main*"]]
    assert ask("sinfo", "--noheader", "--summarize", "--partition=preemptible", "--format=%D") == "2"


def test_an_array_of_whole_nodes_runs_on_both_at_once(tmp_path):
    meet = "touch at.$SLURMD_NODENAME; until [ -e at.n0 ] && [ -e at.n1 ]; do sleep 0.1; done"
    script = f"echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES $(date +%s.%N); {meet}; date +%s.%N"
    job = sbatch(tmp_path, script, "--array=0-3", "--gres=gpu:8", f"--output={tmp_path}/%a.out")
    wait_for_end(job)
    words = [(tmp_path / f"{index}.out").read_text().split() for index in range(4)]
    assert {word[0] for word in words} == {"n0", "n1"}
    assert {word[1] for word in words} == {"0,1,2,3,4,5,6,7"}
    spans = [(float(word[2]), float(word[3])) for word in words]
    at_once = [sum(start <= begin < end for start, end in spans) for begin, _ in spans]
    assert max(at_once) == 2
    ends = [f"{job}_{index}|COMPLETED|0:0" for index in range(4)]
    wait_until(lambda: sorted(accounting(job)) == ends, SOON_S, "COMPLETED in the accounting")


def test_half_a_node_sees_its_own_gpus(tmp_path):
    meet = "touch here.$SLURM_JOB_ID; until [ $(ls here.* | wc -l) = 2 ]; do sleep 0.1; done"
    script = f"echo $CUDA_VISIBLE_DEVICES; {meet}"
    jobs = [sbatch(tmp_path, script, "--gres=gpu:4", "--nodelist=n0") for _ in range(2)]
    for job in jobs:
        wait_for_end(job)
    assert sorted(output(tmp_path, job).strip() for job in jobs) == ["0,1,2,3", "4,5,6,7"]


def test_accounting_knows_failures_and_their_codes(tmp_path):
    job = sbatch(tmp_path, "exit 3")
    wait_for_end(job)
    wait_until(lambda: accounting(job) == [f"{job}|FAILED|3:0"], SOON_S, "FAILED in the accounting")


@pytest.mark.parametrize("option", ["--qos=nowhere", "--account=nowhere", "--partition=nowhere"])
def test_what_no_cluster_grants_is_refused(tmp_path, option):
    with pytest.raises(subprocess.CalledProcessError):
        sbatch(tmp_path, "true", option)


def test_a_qos_and_an_account_are_granted(tmp_path):
    job = sbatch(tmp_path, "true", "--qos=high", "--account=dev")
    wait_for_end(job)
    wait_until(lambda: accounting(job) == [f"{job}|COMPLETED|0:0"], SOON_S, "COMPLETED in the accounting")


def test_scancel_ends_the_whole_tree(tmp_path):
    tree, names = "sleep 971 & setsid sleep 972 &", {"971", "972", "974", "975"}
    if dev_cluster_files.can_use_cgroups():
        tree, names = f"{tree} (setsid sleep 973 &)", names | {"973"}  # in the end a child of nobody
    job = sbatch(tmp_path, f"srun bash -c '{tree} ; sleep 974' & sleep 975 & wait")
    wait_until(lambda: sleepers(job) == names, SOON_S, f"a tree of {names}")
    ask("scancel", job)
    wait_until(lambda: not sleepers(job), SOON_S, "end of the tree")
    wait_for_end(job)


def sleepers(job: str) -> set[str]:
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if (
            words[0] == "sleep"
            and words[1].startswith("97")
            and environment_of(int(path.name)).get("SLURM_JOB_ID") == job
        ):
            found.add(words[1])
    return found


def test_a_requeued_job_starts_again_and_knows_it(tmp_path):
    job = sbatch(tmp_path, task(tmp_path))
    wait_until(lambda: "start 0" in said(tmp_path, job), SOON_S, "start")
    ask("scontrol", "requeue", job)
    wait_until(lambda: "start 1" in said(tmp_path, job), SOON_S, "second start")
    assert said(tmp_path, job) == ["start 0", "SIGTERM", "start 1"]
    ask("scancel", job)

    def ends() -> list[str]:
        return [line.split("|")[1].partition(" by ")[0] for line in accounting(job, "--duplicates")]

    wait_until(lambda: ends() == ["REQUEUED", "CANCELLED"], SOON_S, "the ends of both starts in the accounting")


@pytest.mark.exhaustive
def test_preemption_warns_the_tasks_and_requeues(tmp_path):
    job = sbatch(tmp_path, task(tmp_path, terms=2), "--partition=preemptible", "--gres=gpu:8")
    wait_until(lambda: "start 0" in said(tmp_path, job), SOON_S, "start")
    other = sbatch(tmp_path, "true", "--nodes=2", "--exclusive")
    wait_until(lambda: "SIGTERM" in said(tmp_path, job), SOON_S, "the warning")
    assert ask("squeue", "--noheader", f"--jobs={job}", "--format=%T") == "RUNNING"  # it may save, for GraceTime
    wait_until(lambda: "start 1" in said(tmp_path, job), 120, "second start")
    wait_until(lambda: accounting(other) == [f"{other}|COMPLETED|0:0"], SOON_S, "the other job in the accounting")
    assert f"{job}|PREEMPTED|0:0" in accounting(job, "--duplicates")


@pytest.mark.exhaustive
def test_the_requested_signal_comes_before_the_end(tmp_path):
    """SLURM looks at the time every 30 s or so: a warning may come half a minute early."""
    trap = f"trap 'echo batch USR1 >> $SLURM_JOB_ID.said' USR1; {task(tmp_path)} & wait; wait"
    batch = sbatch(tmp_path, trap, "--time=1", "--signal=B:USR1@50")
    tasks = sbatch(tmp_path, trap, "--time=1", "--signal=USR1@50")
    wait_until(lambda: len(said(tmp_path, batch) + said(tmp_path, tasks)) == 4, 120, "the signals")
    assert said(tmp_path, batch) == ["start 0", "batch USR1"]
    assert said(tmp_path, tasks) == ["start 0", "SIGUSR1"]


def test_tasks_of_two_nodes_know_which_they_are(tmp_path):
    line = "echo $SLURM_NODEID $SLURMD_NODENAME $SLURM_PROCID $SLURM_NNODES $SLURM_JOB_NODELIST"
    job = sbatch(tmp_path, f"srun bash -c '{line}'", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:8")
    wait_for_end(job)
    assert sorted(output(tmp_path, job).splitlines()) == ["0 n0 0 2 n[0-1]", "1 n1 1 2 n[0-1]"]


@pytest.mark.timed
def test_a_dead_node_is_noticed_and_its_job_goes_on_when_it_is_back(slurm, tmp_path):
    victim, other = (sbatch(tmp_path, task(tmp_path), "--gres=gpu:8", f"--nodelist={n}") for n in ("n1", "n0"))
    for job in (victim, other):
        wait_until(lambda job=job: "start 0" in said(tmp_path, job), SOON_S, "start")
    assert len(processes_of_jobs(slurm.conf, "n1")) >= 5  # two steps, the batch script, srun, the task
    started = time.monotonic()
    slurm.kill_node("n1")
    assert processes_of_jobs(slurm.conf, "n1") == []
    assert not slurm.is_up
    state = ["sinfo", "--noheader", "--Node", "--nodes=n1", "--partition=main", "--format=%T"]
    wait_until(lambda: ask(*state).startswith("down"), 120, "the node's death in sinfo")
    assert time.monotonic() - started < 75
    wait_until(
        lambda: ask("squeue", "--noheader", f"--jobs={victim}", "--format=%T") == "PENDING", SOON_S, "the requeue"
    )
    slurm.start_node("n1")
    wait_until(lambda: "start 1" in said(tmp_path, victim), SOON_S, "second start")
    assert said(tmp_path, victim) == ["start 0", "start 1"]  # nobody was told
    assert said(tmp_path, other) == ["start 0"]
    assert slurm.is_up
    wait_until(lambda: f"{victim}|NODE_FAIL|0:0" in accounting(victim, "--duplicates"), SOON_S, "NODE_FAIL")


# --- up and down ------------------------------------------------------------------------------------------------------


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "launch.dev_cluster", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parent.parent)


def processes_with(conf: Path) -> list[int]:
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in pids if environment_of(pid).get("SLURM_CONF") == str(conf)]


def test_up_and_env_of_a_cluster_that_is_up(slurm):
    again = run_command("up", f"--dir={slurm.path}")
    assert again.stdout.splitlines() == ["up already", f"export SLURM_CONF={slurm.conf}"]
    assert run_command("env", f"--dir={slurm.path}").stdout == f"export SLURM_CONF={slurm.conf}\n"
    status = run_command("status", f"--dir={slurm.path}")
    assert status.returncode == 0
    assert "gpu:8" in status.stdout


def test_a_second_cluster_meets_no_other_and_goes_without_a_trace(slurm, short_path):
    up = run_command("up", f"--dir={short_path}")
    assert up.returncode == 0, up.stderr
    second = DevCluster(short_path)
    line = ["--wrap=srun bash -c 'trap : TERM; (setsid sleep 600 &) ; while true; do sleep 1; done'"]
    environment = os.environ | {"SLURM_CONF": str(second.conf)}
    command = ["sbatch", "--parsable", f"--output={short_path}/job.out", *line]
    job = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
    wait_until(
        lambda: "sleep" in {name_of(Path(f"/proc/{pid}")) for pid in processes_with(second.conf)},
        SOON_S,
        "the job's start",
    )
    assert job not in ask("squeue", "--noheader", "--format=%A").split()
    down = run_command("down", "--purge", f"--dir={short_path}")
    assert down.returncode == 0, down.stderr
    assert processes_with(second.conf) == []
    assert not short_path.exists()
    assert slurm.is_up
    status = run_command("status", f"--dir={short_path}")
    assert status.returncode == 2
    assert "not running: n0" in status.stderr


def test_a_daemon_that_fails_is_told_with_its_log(short_path, monkeypatch):
    broken = dev_cluster_files.SLURM_CONF + "PartitionName=odd Nodes=n9\n"
    monkeypatch.setattr(dev_cluster_files, "SLURM_CONF", broken)
    cluster = DevCluster(short_path)
    with pytest.raises(UserError, match="n9") as caught:
        cluster.up()
    assert caught.value.what.startswith("slurmctld ended")
    assert processes_with(cluster.conf) == []
    assert (short_path / "slurm.conf").exists()  # to look at
    monkeypatch.undo()
    cluster.up()
    assert cluster.is_up
    cluster.down(purge=True)
    assert not short_path.exists()


def test_what_is_no_cluster_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").touch()
    for action in ("up", "down"):
        done = run_command(action, "--purge", f"--dir={tmp_path}")
        assert (done.returncode == 2) == (action == "up"), done.stderr
        assert (tmp_path / "thesis.tex").exists()
