"""What the agent makes of an attempt: how it ended, whether it goes on, and what a full disk costs."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import run

from prl.config import compose
from prl.config.errors import UserError
from prl.planning.planner import make_plan
from prl.planning.run_plan import plan_to_json
from prl.runtime import agent
from prl.runtime.agent import conclude, read_attempts
from prl.runtime.directory.identity import describe_process
from prl.runtime.directory.ledger import read_failures
from prl.runtime.directory.rundir import claim
from prl.runtime.nodes.job_nodes import KEY

PLAN = SimpleNamespace(config=SimpleNamespace(sweep="s"))
WRONG = UserError("there is no data", where="sft.data", fix="sft.data=...")


@pytest.fixture
def point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a SLURM job, after an attempt that a node's failure ended."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    path = tmp_path / "s/seed-1"
    path.mkdir(parents=True)
    write_status(path, root={"pid": 1, "started": "then"})
    return path


def write_status(point: Path, **other: object) -> None:
    status = {"state": "failed", "failure": {"class": "node", "message": "a node died"}, "step": 4, "attempt": 1}
    (point / "status.json").write_text(json.dumps(status | other))


@pytest.mark.parametrize(
    ("code", "error", "ours", "kind", "again"),
    [
        (2, WRONG, False, "config", False),
        (2, WRONG, True, "config", False),
        (1, None, False, "code", False),  # died before it could write a status
        (1, None, True, "node", True),
    ],
)
def test_an_earlier_failure_is_not_this_one(point, code, error, ours, kind, again):
    if ours:
        write_status(point, root=describe_process())
    assert conclude(PLAN, point, "7", [{"attempt": 1, "step": 0}], code, error, None) == again
    (row,) = read_attempts(point)
    assert (row["class"], row["requeued"], row["step"]) == (kind, again, 4)
    (told,) = read_failures(point.parent)
    message = {"node": "a node died", "code": "exit code 1", "config": WRONG.render()}[kind]
    assert (told["class"], told["message"], told["requeued"]) == (kind, message, again)


@pytest.mark.parametrize(("code", "warned", "again"), [(0, None, False), (143, "time", True), (1, None, False)])
def test_a_full_disk_costs_the_line_and_not_the_decision(point, monkeypatch, code, warned, again):
    monkeypatch.setattr(agent, "append_objects", refuse_for_want_of_space)
    assert conclude(PLAN, point, "7", [], code, None, warned) == again


def refuse_for_want_of_space(*given: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_point_by_hand_inside_a_job_leaves_requeueing_to_its_user(point, monkeypatch):
    (point / "plan.json").write_text(plan_to_json(make_plan(compose(["deployment.device=cpu", "sweep=s"]))))
    asked = []
    monkeypatch.setattr(agent, "requeue", asked.append)
    monkeypatch.setattr(agent, "run_job", lambda *_, **__: write_status(point, root=describe_process()) or 1)
    for arguments, expected in (([str(point)], []), (["--list", str(point / "list")], ["7"])):
        (point / "list").write_text(f"{point}\n")
        monkeypatch.setattr("sys.argv", ["agent", *arguments])
        with pytest.raises(SystemExit) as left:
            agent.main()
        assert (left.value.code, asked) == (1, expected)


def test_a_full_disk_does_not_hide_how_a_run_on_several_nodes_ended(point, monkeypatch):
    plan = make_plan(compose(["deployment=multi_node", "deployment.device=cpu"]))
    (point / "plan.json").write_text(plan_to_json(plan))
    monkeypatch.setenv(KEY, "a job's")
    monkeypatch.delenv("SLURM_JOB_ID")
    monkeypatch.setattr(agent, "announce", refuse_for_want_of_space)
    monkeypatch.setattr(agent, "run_job", lambda *_, **__: 0)
    assert agent.run_attempt(point) == 0
    assert read_attempts(point)[-1]["exit_code"] == 0


def test_an_attempt_beside_a_living_one_tells_nothing(point, monkeypatch):
    plan = make_plan(compose(["deployment.device=cpu", "sweep=s"]))
    (point / "plan.json").write_text(plan_to_json(plan))
    monkeypatch.setattr(agent, "run_job", lambda *_, **__: 0)
    agent.write_attempt(point, {"attempt": 1, "job": "6"})
    lock = claim(plan.model_copy(update={"config": plan.config.model_copy(update={"output_dir": str(point)})}))
    with pytest.raises(UserError, match="a run is alive"):
        agent.run_attempt(point)
    assert (len(read_attempts(point)), read_failures(point.parent)) == (1, [])
    lock.release()
    assert agent.run_attempt(point) == 0
    assert (len(read_attempts(point)), len(read_failures(point.parent))) == (2, 1)


@pytest.mark.parametrize(
    "content", ["", "{", "{}", '{"point_id": "x"}', "[" * 100_000, b"\xff\xfe", "7"], ids=lambda t: repr(t[:9])
)
def test_a_damaged_plan_is_told(point, content):
    (point / "plan.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UserError, match="is damaged") as told:
        agent.read_plan(point)
    assert "sweep.json" in told.value.fix


@pytest.mark.parametrize(("lines", "index"), [(None, "0"), ("", "0"), ("a\nb\n", "2"), ("a\n", "x"), ("\n", "0")])
def test_a_list_that_names_no_point_is_told(tmp_path, monkeypatch, lines, index):
    listing = tmp_path / "1.points"
    if lines is not None:
        listing.write_text(lines)
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", index)
    with pytest.raises(UserError) as told:
        agent.choose(listing)
    assert str(listing) in told.value.what
    assert told.value.fix


@pytest.mark.slow
def test_the_command_that_made_a_plan_mends_it(tmp_path):
    lines = ["-m", "hydra.launcher.dry_run=true", "hydra/launcher=local", "sweep=s", "seed=1"]
    assert run(lines, tmp_path).code == 0
    (plan,) = tmp_path.glob("outputs/sweeps/s/*/plan.json")
    before = plan.read_text()
    plan.write_text('{"point_id": "another version\'s"}')
    refused = run([str(plan.parent)], tmp_path, "prl.runtime.agent")
    assert refused.code == 2
    assert f": > {plan}; the command" in refused.output
    plan.write_text("")
    assert run(lines, tmp_path).code == 0
    assert plan.read_text() == before
