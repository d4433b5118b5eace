"""Runs whose directories were damaged: prl.status, prl.watch and prl.compare say which file cannot be read, and why."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from watch_directory import make_run

from prl.cancel import main, stop_runs, what_it_is
from prl.compare.points import read_directory
from prl.compare.ranking import compare
from prl.compare.table import render_text
from prl.compare.targets import read_targets
from prl.runtime.people.faults import find_faults
from prl.status import render
from prl.watch.store import Store


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text(content) and None


def drop(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


def make_folder(name: str) -> Callable[[Path], None]:
    def act(run: Path) -> None:
        (run / name).unlink()
        (run / name).mkdir()

    return act


DAMAGES = [  # what was done, the file, and why
    (write("status.json", ""), "status.json", "it is empty"),
    (write("status.json", "\0" * 99), "status.json", "holds zeros alone"),
    (write("status.json", '{"state": "do'), "status.json", "it is no JSON (Unterminated string"),
    (write("status.json", "[1]"), "status.json", "it is JSON, but no object"),
    (write("status.json", '{"state": "fine"}'), "status.json", "its state is none of starting"),
    (
        write("status.json", '{"state": "done", "step": "x", "roles": [1]}'),
        "status.json",
        "such values of roles, step",
    ),
    (make_folder("status.json"), "status.json", "cannot be read: Is a directory"),
    (drop("status.json"), "status.json", "is missing, and metrics say that the run has begun"),
    (write("plan.json", "{"), "plan.json", "it is no JSON"),
    (write("plan.json", '{"point_id": "x"}'), "plan.json", "it has no config"),
    (drop("plan.json"), "plan.json", "is missing"),
    (write("metrics/trainer.0.jsonl", "\0" * 9 + "\n{\n"), "trainer.0.jsonl", "none of its last 2 lines"),
    (drop("metrics/orchestrator.jsonl"), "orchestrator.jsonl", "says that step 6 was reached"),
    (make_folder("metrics/orchestrator.jsonl"), "orchestrator.jsonl", "Is a directory"),
]


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize(("damage", "file", "why"), DAMAGES)
def test_all_say_which_file_of_a_run_cannot_be_read(tmp_path, damage, file, why, is_listed):
    good, bad = (make_run(tmp_path / "s" / name, {"seed": "1"}) for name in ("good", "bad"))
    points = [{"dir": name, "point_id": "p", "swept": {}} for name in ("good", "bad")]
    if is_listed:
        (tmp_path / "s/sweep.json").write_text(json.dumps({"points": points}))
    damage(bad)
    rows = {row["name"]: row for row in Store(tmp_path).overview()["runs"]}
    of_compare = {point.name: point for point in read_directory(tmp_path / "s")}
    table, _ = render(tmp_path / "s")
    (line,) = [line for line in table.splitlines() if line.startswith("bad ")]
    states = {
        line.split()[1],
        rows["s/bad"]["state"],
        of_compare["bad"].state,
        what_it_is(bad).split(" is a run that is ")[1].split()[0].strip(","),
    }
    assert states == {"unreadable"}, "one answer of all, and so it is not ranked"
    assert "  bad/" in line  # not cut, however long the path to the sweep
    assert file in line
    for told in (rows["s/bad"]["why"], of_compare["bad"].why, render(bad)[0]):
        assert file in told
        assert why in told
        assert str(bad) in told
    assert (rows["s/good"]["why"], of_compare["good"].why, find_faults(good)) == ("", "", [])
    assert Store(bad).overview()["runs"][0]["why"] == rows["s/bad"]["why"]
    assert "unreadable" in render_text(compare("s", list(of_compare.values()), "steps"))


def test_nothing_is_missing_of_what_has_not_begun(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"seed": "1"})
    for name in ("metrics/trainer.0.jsonl", "metrics/orchestrator.jsonl", "status.json"):
        (run / name).unlink()
    assert find_faults(run) == []
    assert [point.state for point in read_directory(run)] == ["not started"]
    (run / "plan.json").rename(tmp_path / "sweep.json")
    assert find_faults(tmp_path / "gone") == []


def test_what_lives_and_has_no_status_yet_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "s/run", {"seed": "1"}, state="running")
    (run / "status.json").unlink()
    with (run / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert find_faults(run) == []
        assert [point.state for point in read_directory(run)] == ["running"]
        assert render(tmp_path / "s")[0].splitlines()[1].split()[:2] == ["run", "running"]
        assert stop_runs(tmp_path / "s")[1][0].startswith("run is alive, but")


def test_a_record_of_a_sweep_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    make_run(tmp_path / "s/a", {"seed": "1"})
    (tmp_path / "s/sweep.json").write_text("[]")
    _, (note,) = read_targets([str(tmp_path / "s")])
    assert note.startswith(f"{tmp_path}/s/sweep.json cannot be used: it is JSON, but no object")
    assert Store(tmp_path).overview()["faults"] == [note.partition(";")[0]]


# --- prl.cancel -------------------------------------------------------------------------------------------------------


def cancel(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: Path) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    monkeypatch.setattr("sys.argv", ["prl cancel", str(path)])
    with pytest.raises(SystemExit) as left:
        main()
    return int(str(left.value)), *capsys.readouterr()


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("nowhere", 2, "There is no directory {}/nowhere."),
        ("a\nb", 2, "There is no directory {}/a\\nb."),
        ("file", 2, "{}/file is no directory."),
        ("empty", 2, "here is nothing, and no run below"),
        ("full", 2, "here are other files, and no run below"),
        ("s/done", 1, "nothing was running or waiting: {}/s/done is a run that is done, step 6/6\n"),
        ("s/failed", 1, "is a run that is failed, step 6/6 (oom: trainer/0: <b>out</b> of memory)"),
        ("s/lost", 1, "is a run that is lost, step 6/6"),
        ("s/frozen", 1, "is a run that is not started\n"),
        ("s/broken", 1, "is a run that is unreadable ({}/s/broken/status.json cannot be used: it is empty)"),
        ("s", 1, "{}/s is a sweep with 6 points (1 done, 1 failed, 1 lost, 1 missing, 1 not started, 1 unreadable)"),
        ("", 1, "{} is no run and no sweep, but holds 4 runs (1 done, 1 failed, 1 lost, 1 unreadable)"),
    ],
)
def test_cancel_says_what_it_was_given_where_nothing_runs(monkeypatch, capsys, tmp_path, name, code, says):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full/inner").mkdir(parents=True)
    (tmp_path / "file").touch()
    for state in ("done", "failed", "running"):
        make_run(tmp_path / "s" / state, {"seed": "1"}, state=state)
    (tmp_path / "s/running").rename(tmp_path / "s/lost")
    make_run(tmp_path / "s/broken", {"seed": "1"}).joinpath("status.json").write_text("")
    (tmp_path / "s/frozen").mkdir()
    (tmp_path / "s/frozen/plan.json").write_text('{"config": {}}')
    points = [{"dir": one} for one in ("done", "failed", "lost", "broken", "frozen", "gone")]
    (tmp_path / "s/sweep.json").write_text(json.dumps({"points": points}))
    left, out, err = cancel(monkeypatch, capsys, tmp_path / name)
    assert (left, out) == (code, "")
    assert says.format(tmp_path) in err
