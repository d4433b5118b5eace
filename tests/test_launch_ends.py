"""Points that cannot say themselves how they ended: SLURM, or their job's log, says it for them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from test_compare import make_point

from launch import ends
from launch.launching import why_it_does_not_serve
from launch.slurm import reasons_of
from launch.sweep_file import read_sweep, refused_points
from prl.status import render

SACCT = "echo '7_0|FAILED|3:0'; echo '7_1|OUT_OF_MEMORY|0:9'"
CONTROLLER = 'echo "JobId=7 JobState=NODE_FAIL Reason=None ExitCode=1:0"'


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """Programs of a SLURM that knows of jobs 7_0 and 7_1, and whose controller says the same of all others."""

    def programs(sacct: str = SACCT, scontrol: str = CONTROLLER) -> None:
        for name, does in {"squeue": ":", "sacct": sacct, "scontrol": scontrol}.items():
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
    assert states == {"a": "planned", "b": "refused", "c": "missing"}
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
