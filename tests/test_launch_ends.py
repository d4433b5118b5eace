"""Points that cannot say themselves how they ended: SLURM, or their job's log, says it for them."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path

import pytest
from test_compare import make_point

from launch import ends
from launch.launching import why_it_does_not_serve
from launch.slurm import reasons_of
from launch.sweep_file import read_sweep, refused_points
from prl.compare.targets import read_targets
from prl.runtime.directory.ledger import record_failure
from prl.status import render
from prl.watch.store import Store

SACCT = "echo '7_0|FAILED|3:0'; echo '7_1|OUT_OF_MEMORY|0:9'"
CONTROLLER = 'echo "JobId=7 JobState=NODE_FAIL Reason=None ExitCode=1:0"'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs of a SLURM that knows of jobs 7_0 and 7_1, and whose controller says the same of all others."""

    def programs(sacct: str = SACCT, scontrol: str = CONTROLLER, squeue: str = ":") -> None:
        for name, does in {"squeue": squeue, "sacct": sacct, "scontrol": scontrol}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{does}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    programs()
    return programs


def record(sweep: Path, points: list[str], **more) -> None:
    (sweep / "slurm").mkdir(parents=True, exist_ok=True)
    listed = [{"dir": name, "point_id": name} for name in points]
    (sweep / "sweep.json").write_text(json.dumps({"points": listed, **more}))


def submitted(*points: str, job: str = "7", is_array: bool = True, time: float = 1.0) -> dict:
    return {"job_id": job, "is_array": is_array, "points": list(points), "time": time}


def row_of(text: str, name: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(name))


def test_a_job_that_died_before_its_agent_says_by_what(tmp_path, cluster):
    sweep = tmp_path / "s"
    record(sweep, ["a", "b", "c"], submissions=[submitted("a", "b", "c")])
    (sweep / "slurm/7_0.log").touch()
    (sweep / "slurm/7_1.log").write_text("loading\nsrun: error: n0: task 0: Killed\nslurmstepd: cleaning up\n")
    text, alive = render(sweep)
    assert not alive
    assert row_of(text, "a").endswith("job 7_0: FAILED, exit code 3; slurm/7_0.log is empty")
    said = "job 7_1: OUT_OF_MEMORY, signal 9; srun: error: n0: task 0: Killed (slurm/7_1.log)"
    assert row_of(text, "b").endswith(said)
    assert row_of(text, "c").endswith("job 7_2: NODE_FAIL, exit code 1; there is no slurm/7_2.log")
    assert "missing" in row_of(text, "a")
    assert "not started: a, b, c; the sweep's command submits again" in text
    cluster(sacct="exit 1", scontrol="exit 1")  # without accounting, or away
    assert "SLURM knows nothing of it any more; srun: error: n0: task 0: Killed" in row_of(render(sweep)[0], "b")


@pytest.mark.parametrize(
    ("row", "end"),
    [
        ("7|CANCELLED by 0|0:0", "CANCELLED by 0, exit code 0"),
        ("7_[0-1]|CANCELLED by 0|0:0", "CANCELLED by 0, exit code 0"),
        ("7_[1]|PENDING|0:0", "cancelled while it waited"),  # the others are in the queue
        ("7_1|COMPLETED|0:0", "SLURM knows nothing of it any more"),  # another one's
    ],
)
def test_an_element_that_never_started_is_in_the_row_of_its_array(tmp_path, cluster, row, end):
    cluster(sacct=f"echo '{row}'", scontrol="exit 1")
    record(tmp_path / "s", ["a"], submissions=[submitted("a")])
    assert f"job 7_0: {end}; there is no slurm/7_0.log" in row_of(render(tmp_path / "s")[0], "a")


def test_a_server_that_never_began_says_why(tmp_path, cluster):
    record(tmp_path / "i", ["."], submissions=[submitted(".", job="7_0", is_array=False)])
    (tmp_path / "i/slurm/7_0.log").touch()
    told = why_it_does_not_serve(tmp_path / "i")
    assert told.startswith("it does not serve: job 7_0: FAILED, exit code 3; slurm/7_0.log is empty\n")


def test_points_that_were_only_planned_or_refused_say_so(tmp_path, cluster):
    refusals = [{"time": 2.0, "points": ["b", "c"], "why": "sbatch refused the job: no such partition"}]
    record(tmp_path / "s", ["a", "b", "c"], submissions=[submitted("c", job="7_0", is_array=False, time=3.0)])
    found = json.loads((tmp_path / "s/sweep.json").read_text()) | {"refusals": refusals}
    (tmp_path / "s/sweep.json").write_text(json.dumps(found))
    assert refused_points(read_sweep(tmp_path / "s")) == {"b": refusals[0]["why"]}, "c was taken later"
    states = {
        n: state for n, (state, _) in ends.points_without_word(tmp_path / "s", read_sweep(tmp_path / "s")).items()
    }
    assert states == {"a": "missing", "b": "refused", "c": "missing"}, "a has no plan"
    (tmp_path / "s/a").mkdir(exist_ok=True)
    (tmp_path / "s/a/plan.json").write_text('{"config": {}}')
    assert ends.points_without_word(tmp_path / "s", read_sweep(tmp_path / "s"))["a"] == ("not started", "")
    failed = {"attempt": 1, "node": "n", "job": None, "requeued": False}
    for point, message in (("a", "was refused\n  where: there"), ("b", "another's")):
        record_failure(tmp_path / "s" / point, kind="config", message=message, **failed)
    assert row_of(render(tmp_path / "s")[0], "a").endswith("config: was refused")
    assert row_of(render(tmp_path / "s")[0], "b").endswith("no such partition")


@pytest.mark.parametrize("job", ["7_1", None])
def test_a_run_whose_agent_was_killed_says_by_what_and_how_it_goes_on(tmp_path, cluster, job):
    run = make_point(tmp_path / "s/point", [0.0, 0.5], state="running")  # and nobody holds its lock
    record(tmp_path / "s", ["point"])
    (tmp_path / "s/slurm/7_1.log").write_text("srun: error: n0: task 0: Killed\n")
    (run / "attempts.jsonl").write_text(json.dumps({"attempt": 1, "job": job, "node": "n0", "started": 1.0}) + "\n")
    why = "OUT_OF_MEMORY, signal 9; srun: error: n0: task 0: Killed" if job else "killed, or with their machine"
    lines = render(run)[0].splitlines()
    assert lines[0].split(": ")[1].startswith("lost")
    assert why in lines[-2]
    assert lines[-1].startswith("it may pass: the sweep's command tries it again")
    assert "gone without a last word" in row_of(render(tmp_path / "s")[0], "point")


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("Priority", "job 7_0 waits: Priority"),
        ("None", ""),
        ("JobHeldUser", "job 7_0 is held (JobHeldUser): scontrol release 7_0 lets it go"),
        ("JobHeldAdmin", "job 7_0 is held (JobHeldAdmin): an administrator lets it go"),
        ("ReqNodeNotAvail, Reserved|x", "job 7_0 waits: ReqNodeNotAvail, Reserved|x"),
    ],
)
def test_a_point_that_waits_says_for_what(tmp_path, cluster, reason, told):
    record(tmp_path / "s", ["a"], submissions=[submitted("a")])
    cluster(squeue=f"echo '7_0|PENDING|N/A|{reason}'")
    text, alive = render(tmp_path / "s")
    assert alive
    assert row_of(text, "a").split(maxsplit=2) == ["a", "queued", *filter(None, [told])]


LATER = "2030-01-01T00:00:00"  # than anything that the run of a test has told


@pytest.mark.parametrize(
    ("queue", "state", "told"),
    [
        ("7_0|PENDING|N/A|BeginTime", "queued", "job 7_0 waits: BeginTime"),
        (f"7_0|RUNNING|{LATER}|None", "starting", "job 7_0 runs again"),
        ("7_0|RUNNING|2000-01-01T00:00:00|None", "failed", "job 7_0 has not ended yet"),
        (f"7_0|COMPLETING|{LATER}|None", "failed", "job 7_0 has not ended yet"),  # already sent back to the queue
    ],
)
def test_a_point_whose_job_slurm_starts_again_is_not_left_to_the_sweeps_command(tmp_path, cluster, queue, state, told):
    sweep = tmp_path / "s"
    run = make_point(sweep / "a", [0.0, 0.5], state="failed")
    status = json.loads((run / "status.json").read_text())
    killed = {"class": "node", "role": "root", "message": "the root process was killed"}
    (run / "status.json").write_text(json.dumps(status | {"failure": killed}))
    record(sweep, ["a"], submissions=[submitted("a")])
    assert "failed, and may pass: a" in render(sweep)[0]
    assert read_targets([str(sweep)])[1] == ["failed, and may pass: a; the sweep's command tries again"]
    cluster(squeue=f"echo '{queue}'")
    text = render(sweep)[0]
    assert row_of(text, "a").split()[1] == state
    assert f"{told}; " in row_of(text, "a")
    assert "may pass" not in text
    whole = render(run)[0].splitlines()
    assert f": {state}, step" in whole[0]
    assert whole[-1] == told
    shown = Store(sweep)
    assert shown.overview()["runs"][0]["state"] == shown.state_of(shown.run("a"))["state"] == state
    assert shown.overview()["runs"][0]["why"].startswith(told)
    (point,), notes = read_targets([str(sweep)])
    assert (point.state, point.why.startswith(f"{told}; ")) == (state, True), "prl.compare"
    assert notes == []


def test_a_point_that_was_killed_is_not_gone_while_its_job_is_there(tmp_path, cluster):
    run = make_point(tmp_path / "s/a", [0.0, 0.5], state="running")  # and nobody holds its lock
    record(tmp_path / "s", ["a"], submissions=[submitted("a")])
    cluster(squeue="echo '7_0|RUNNING|2000-01-01T00:00:00|None'")
    assert row_of(render(tmp_path / "s")[0], "a").split()[1] == "lost"
    assert row_of(render(tmp_path / "s")[0], "a").endswith("  job 7_0 has not ended yet")
    assert render(run)[0].splitlines()[-1] == "job 7_0 has not ended yet"


def test_a_point_that_is_done_stays_done_while_its_job_ends(tmp_path, cluster):
    make_point(tmp_path / "s/a", [0.0, 0.5])
    record(tmp_path / "s", ["a"], submissions=[submitted("a")])
    cluster(squeue=f"echo '7_0|COMPLETING|{LATER}|None'")
    assert row_of(render(tmp_path / "s")[0], "a").split()[1] == "done"


def test_a_suspended_run_is_no_running_one(tmp_path, cluster):
    run = make_point(tmp_path / "s/a", [0.0, 0.5], state="running")
    record(tmp_path / "s", ["a"], submissions=[submitted("a")])
    cluster(squeue="echo '7_0|SUSPENDED|2000-01-01T00:00:00|None'")
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        text, alive = render(tmp_path / "s")
        whole = render(run)[0]
    assert alive
    assert row_of(text, "a").split()[1] == "suspended"
    assert "job 7_0 is suspended: scontrol resume 7_0 lets it go on" in row_of(text, "a")
    assert whole.splitlines()[-1].startswith("job 7_0 is suspended")


@pytest.mark.parametrize(
    ("said", "reasons"),
    [
        (
            "sbatch: unrecognized option '--bogus=1'\nTry \"sbatch --help\" for more information",
            ["unrecognized option '--bogus=1'"],
        ),
        ("sbatch: error: a\nsbatch: error: Batch job submission failed: b", ["a", "Batch job submission failed: b"]),
        ("", ["without a word"]),
        ("command not found", ["command not found"]),
    ],
)
def test_what_sbatch_says_is_told(said, reasons):
    assert reasons_of(said) == reasons
