"""What a job's batch script makes of an attempt whose agent was killed; `test_slurm.py` has it on a real SLURM."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from prl.config import compose
from prl.planning.planner import make_plan
from prl.planning.run_plan import plan_to_json
from prl.runtime import afterwards
from prl.runtime.directory.ledger import read_failures
from prl.runtime.directory.status_file import read_attempts, read_status

BEGAN = {"attempt": 1, "job": "7", "node": "n0", "started": 1.0}
ENDED = {"attempt": 1, "ended": 2.0, "exit_code": 1, "class": "code", "step": 4, "requeued": False}
KILLED = "srun: error: n0: task 0: Killed\n"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a job that still runs, its agent killed at step 4."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(afterwards, "state_of", lambda job: "RUNNING")
    path = tmp_path / "s/seed-1"
    (tmp_path / "s/slurm").mkdir(parents=True)
    path.mkdir()
    (tmp_path / "s/slurm/1.points").write_text(f"{path}\n")
    (path / "plan.json").write_text(plan_to_json(make_plan(compose(["deployment.device=cpu", "sweep=s"]))))
    (path / "status.json").write_text(json.dumps({"state": "running", "failure": None, "step": 4, "roles": {}}))
    tell(path, BEGAN)
    return path


def tell(point: Path, *rows: dict) -> None:
    (point / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def conclude(point: Path, monkeypatch: pytest.MonkeyPatch, said: str = KILLED) -> list[str]:
    """As the batch script does it. Returns the jobs that are requeued."""
    requeued: list[str] = []
    monkeypatch.setattr(afterwards, "requeue", requeued.append)
    (point.parent / "slurm/7.log").write_text(said)
    monkeypatch.setattr(sys, "argv", ["afterwards", "--list", str(point.parent / "slurm/1.points"), "--code", "137"])
    with pytest.raises(SystemExit) as left:
        afterwards.main()
    assert left.value.code == 137
    return requeued


@pytest.mark.parametrize(
    ("said", "kind", "requeued", "message"),
    [(KILLED, "node", ["7"], "the root process was killed"), (OOM + KILLED, "oom", [], "hydra.launcher.slurm.mem=")],
)
def test_the_end_of_a_killed_agent_is_told(point, monkeypatch, said, kind, requeued, message):
    assert conclude(point, monkeypatch, said) == requeued
    (row,) = read_attempts(point)
    assert (row["class"], row["exit_code"], row["step"], row["requeued"]) == (kind, 137, 4, bool(requeued))
    status = read_status(point)
    assert (status["state"], status["failure"]["class"]) == ("failed", kind)
    (told,) = read_failures(point.parent)
    assert (told["class"], told["requeued"]) == (kind, bool(requeued))
    assert message in told["message"]
    assert message in status["failure"]["message"]


def test_without_retries_left_it_is_told_and_not_requeued(point, monkeypatch):
    monkeypatch.setenv("PRL_MAX_RETRIES", "0")
    assert conclude(point, monkeypatch) == []
    assert read_attempts(point)[0]["class"] == "node"


def test_a_killed_agent_that_had_written_no_status_yet_is_told_as_well(point, monkeypatch):
    (point / "status.json").unlink()
    assert conclude(point, monkeypatch) == ["7"]
    assert read_attempts(point)[0]["class"] == "node"


@pytest.mark.parametrize("why", ["it told its end", "another job's", "cancelled", "no attempt"])
def test_an_attempt_that_is_none_of_its_business_is_left_alone(point, monkeypatch, why):
    if why == "it told its end":
        tell(point, BEGAN, ENDED)
    elif why == "another job's":
        tell(point, BEGAN | {"job": "8"})
    elif why == "no attempt":
        (point / "attempts.jsonl").unlink()
    else:
        monkeypatch.setattr(afterwards, "state_of", lambda job: "CANCELLED")
    before = {path: path.read_bytes() for path in point.iterdir()}
    assert conclude(point, monkeypatch) == []
    assert {path: path.read_bytes() for path in point.iterdir()} == before
