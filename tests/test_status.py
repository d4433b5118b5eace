"""What `prl.status` and its like say of runs that are over, of strange names, and of causes that are long."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from pathlib import Path

import pytest
from watch_directory import make_run

from launch.session import Session
from prl.compare.points import read_directory
from prl.compare.ranking import compare
from prl.compare.table import render_csv, render_json, render_text
from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.metrics.writer import MetricsWriter
from prl.planning import make_plan
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.launch import _conclude
from prl.runtime.people.progress import Progress
from prl.runtime.process.failures import Failure
from prl.runtime.process.signals import StopSignals
from prl.runtime.supervisor import Outcome
from prl.status import WHY_WIDTH, render, show, state_in
from prl.watch.store import Store

ODD = [b"a\nb", b"\xff\xfe", "ü\u2028\x1b[2J".encode()]


def change_status(run: Path, **values: object) -> None:
    found = json.loads((run / "status.json").read_text())
    (run / "status.json").write_text(json.dumps(found | values))


def test_names_and_labels_of_any_bytes_are_lines_of_a_table(tmp_path: Path) -> None:
    for name in ODD:
        make_run(Path(os.fsdecode(os.fsencode(tmp_path) + b"/s/" + name)), {"lr": os.fsdecode(name), "seed": "1"})
    table, _ = render(tmp_path / "s")
    assert len(table.split("\n")) == 1 + len(ODD)
    assert "a\\nb" in table
    assert "\\udcff\\udcfe" in table
    comparison = compare("s", read_directory(tmp_path / "s"), "steps")
    for text in (table, render_text(comparison), render_csv(comparison), render_json(comparison)):
        text.encode()
        assert all(line.isprintable() for line in text.split("\n"))
    assert len(render_csv(comparison).splitlines()) == 1 + len(ODD)
    whole, _ = render(Path(os.fsdecode(os.fsencode(tmp_path) + b"/s/" + ODD[0])))
    assert "a\\nb: done" in whole


NAME = "a\nb\x1b[2J"


def test_errors_and_notes_escape_what_a_name_holds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    told = UserError(f"{NAME} is wrong", where=NAME, why=NAME, fix=f"mv {NAME}")
    assert told.render().count("a\\nb\\x1b[2J") == 4
    assert ConfigError([told, told]).render().count("a\\nb\\x1b[2J") == 8
    Progress("plain").note(f"run directory {NAME}\t1")
    assert capsys.readouterr().out.splitlines() == ["run directory a\\nb\\x1b[2J   1"]
    failure = Failure("code", "trainer/0", 0, 0, NAME, NAME, (f"{NAME}\t1",))
    assert [line.isprintable() for line in failure.render().split("\n")] == [True] * 3
    with pytest.raises(SystemExit):
        show(tmp_path / NAME, follow=False)
    assert capsys.readouterr().err == f"no run in {tmp_path}/a\\nb\\x1b[2J\n"
    Session(lambda config: 0).leave(Path(NAME), "done")
    assert capsys.readouterr().err == "a\\nb\\x1b[2J: done already\n"


@pytest.mark.parametrize("state", ["done", "failed", "stopped", "running"])  # nobody holds the lock: it is lost
def test_no_process_outlives_its_run(tmp_path: Path, state: str) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state=state)
    roles = {"wandb": {"pid": 7, "state": "starting", "exit": None}, "env/a": {"pid": 8, "state": "exited", "exit": 0}}
    change_status(run, roles=roles)
    text, _ = render(run)
    assert "wandb                ended (process 7)" in text
    assert "env/a                exited with exit code 0 (process 8)" in text
    assert Store(tmp_path).overview()["runs"][0]["roles"] == {"wandb": "ended", "env/a": "exited"}


@pytest.mark.parametrize(("listed", "told"), [(False, "to go on: the same command"), (True, "command goes on with it")])
def test_a_stopped_run_says_how_it_goes_on(tmp_path: Path, listed: bool, told: str) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state="stopped")
    if listed:
        (tmp_path / "s/sweep.json").write_text("{}")
    assert told in render(run)[0]


def test_a_long_cause_is_whole_in_the_runs_own_view(tmp_path: Path) -> None:
    run, cause = make_run(tmp_path / "s/run", {"seed": "1"}), "w" * 3 * WHY_WIDTH
    change_status(run, state="failed", failure={"class": "code", "role": "trainer/0", "message": cause})
    assert cause in render(run)[0]
    assert max(map(len, render(tmp_path / "s")[0].split("  "))) <= WHY_WIDTH
    assert render(tmp_path / "s")[0].endswith("w…")


@pytest.mark.parametrize("directory", ["s", "./s", "{}/s"])
def test_files_below_are_named_short_and_others_whole(tmp_path: Path, monkeypatch, directory: str) -> None:
    make_run(tmp_path / "s/run", {"seed": "1"}, state="failed")
    monkeypatch.chdir(tmp_path)
    asked = Path(directory.format(tmp_path))
    cause = f"/a/s/y: {asked}/run/x"
    change_status(tmp_path / "s/run", failure={"class": "node", "role": "root", "message": cause})
    assert render(asked)[0].endswith("node: root: /a/s/y: run/x")


def test_engines_that_are_left_out_are_in_the_status_and_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state="running")
    change_status(run, lost_engines={"http://a": "no answer"})
    assert "engine http://a is left out: no answer" in render(run)[0]
    assert "engines left out: http://a" in render(tmp_path / "s")[0]
    assert Store(tmp_path).overview()["runs"][0]["lost_engines"] == {"http://a": "no answer"}


def test_rollouts_that_an_evaluation_lost_are_in_the_status_and_on_the_page(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state="done")
    counts = {"eval/failed_rollouts": 6, "eval/outcome/ok": 10, "eval/outcome/environment": 6}
    MetricsWriter(run, "orchestrator").log(step=9, **{"eval/reward": 0.9}, **counts)
    told = "6 of 16 rollouts of its last evaluation failed and count for nothing"
    assert told in render(run)[0].splitlines()
    assert render(tmp_path / "s")[0].endswith(told)
    assert Store(tmp_path).overview()["runs"][0]["lost_rollouts"] == told
    MetricsWriter(run, "orchestrator").log(step=10, **{"eval/reward": 0.9}, **(counts | {"eval/failed_rollouts": 0}))
    assert told not in render(run)[0]
    assert Store(tmp_path).overview()["runs"][0]["lost_rollouts"] == ""


@pytest.mark.parametrize(("ahead_s", "told"), [(-75.4, "1:15 ago"), (3700, "1:01:40 ahead")])
def test_a_machine_whose_clock_is_ahead_is_told(tmp_path: Path, monkeypatch, ahead_s: float, told: str) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state="running")
    monkeypatch.setattr(time, "time", lambda: 1e9)
    change_status(run, updated=1e9 + ahead_s)
    assert f"updated {told}" in render(run)[0]
    assert told in render(tmp_path / "s")[0]


def test_a_run_that_makes_a_warm_start_or_waits_for_one_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {}, state="starting")
    make_run(run / "warm_start", {}, steps=30, state="running")
    change_status(run, doing="warm start", step=0)
    change_status(run / "warm_start", step=12)
    with open(run / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert render(tmp_path / "s")[0].endswith("warm start, step 12/30")
        assert "\nwarm start, step 12/30\n" in f"{render(run)[0]}\n"
        assert Store(tmp_path).overview()["runs"][0]["doing"] == "warm start, step 12/30"
        change_status(run, doing="waits for another run's warm start")
        assert render(tmp_path / "s")[0].endswith("waits for another run's warm start")
    assert "warm start" not in render(tmp_path / "s")[0], "it is lost"


def told_to_stop() -> StopSignals:
    signals = StopSignals()
    signals.hear(signal.SIGTERM, 1, None)
    return signals


def test_a_point_that_was_stopped_names_a_command_that_takes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = compose(["warm_start=none", f"output_dir={tmp_path / 's/point'}"])
    plan = make_plan(config.model_copy(update={"sweep": "s"}))
    run_dir = claim(plan)
    _conclude(plan, run_dir, Outcome("stopped", 5), told_to_stop())
    run_dir.release()
    said = capsys.readouterr().out
    assert said.endswith(f"command resumes; for this point alone: python -m prl.runtime.agent {run_dir.path}\n")
    assert "output_dir=" not in said


@pytest.mark.parametrize("state", ["failed", "stopped", "done"])
def test_the_end_names_alarms_that_were_on(tmp_path: Path, capsys: pytest.CaptureFixture[str], state: str) -> None:
    plan = make_plan(compose(["warm_start=none", f"output_dir={tmp_path / 'run'}"]))
    run_dir = claim(plan)
    status = StatusFile(run_dir.path, plan.point_id, "rl", "rl", 9)
    alarm = {"kind": "no_signal", "since": 3, "message": "all rewards are the same"}
    status.update(state=state, step=5, alarms=[alarm])
    failure = Failure("code", "trainer/0", 0, 0, "oh no", "") if state == "failed" else None
    _conclude(plan, run_dir, Outcome(state, 5, failure), told_to_stop())  # type: ignore[arg-type]
    run_dir.release()
    assert "alarm no_signal was on at the end, since step 3: all rewards are the same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("silent", "own", "shown"),
    [
        (("lost", "job 7_0 has not ended yet"), "done", ("done", "")),  # it ended after the queue was asked
        (("lost", "job 7_0 has not ended yet"), "running", ("running", "")),
        (("lost", "job 7_0 has not ended yet"), "lost", ("lost", "job 7_0 has not ended yet")),
        (("failed", "job 7_0 has not ended yet"), "failed", ("failed", "job 7_0 has not ended yet")),
        (("queued", "job 7_0 waits: BeginTime"), "failed", ("queued", "job 7_0 waits: BeginTime")),
        (("starting", "job 7_0 runs again"), "failed", ("starting", "job 7_0 runs again")),
        (("starting", "job 7_0 runs again"), "running", ("running", "")),
        (("suspended", "job 7_0 is suspended"), "running", ("suspended", "job 7_0 is suspended")),
    ],
)
def test_a_points_own_word_is_newer_than_what_was_seen_in_the_queue(silent, own, shown) -> None:
    assert state_in({"p": silent}, "p", own) == shown
