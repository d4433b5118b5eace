"""Hours that were paid for: attempts as runs leave them, and two real points that share a warm start."""

from __future__ import annotations

import csv
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, start
from runtime_tree import wait_for
from test_compare import command, compared, living, make_point
from test_compare_wandb import Api, MirroredRun

from prl.compare.hours import PaidHours
from prl.compare.phases import phase_table
from prl.compare.points import Point, read_directory
from prl.compare.ranking import compare
from prl.compare.table import Table, group_table, point_table
from prl.compare.targets import read_targets
from prl.compare.wandb_source import read_group
from prl.planning.run_plan import plan_from_json
from prl.runtime.directory.claims import Claim
from prl.runtime.directory.hours import Hours, read_hours, summarise
from prl.runtime.warm_cache import warm_start_dir

T0 = 1_800_000_000.0  # Unix seconds, in the future: nothing that the tests' own files tell is later


def record(number: int, began: float, *, over: bool = True, devices: int = 2, **seconds: float) -> dict[str, Any]:
    """A row of hours.json."""
    updated = began + sum(seconds.values())
    row = {"number": number, "job": "7", "devices": devices, "began": began, "updated": updated, "is_over": over}
    return row | {"seconds": seconds}


def point_with(
    path: Path, *attempts: dict[str, Any], agent: list[dict[str, Any]] = (), state="done", **more: Any
) -> Point:  # type: ignore[assignment]
    """A point whose run directory holds these attempts; `agent`: rows of attempts.jsonl."""
    make_point(path, [0.0, 0.5, 0.6], state=state, **more)
    if attempts:
        (path / "hours.json").write_text(json.dumps({"attempts": list(attempts)}))
    (path / "attempts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in agent))
    return next(point for point in read_directory(path.parent) if point.name == path.name)


def cell(table: Table, heading: str, row: int = 0) -> str:
    return table.rows[row][table.headings.index(heading)].text


def paid(point: Point) -> PaidHours:
    assert point.hours is not None
    return point.hours


def test_a_clean_run(tmp_path: Path) -> None:
    point = point_with(tmp_path / "a", record(1, T0, start=600.0, warm_start=600.0, steps=1800.0, waiting=360, end=240))
    assert point.figures["paid_gpu_hours"] == pytest.approx(2.0)
    assert point.figures["in_steps"] == pytest.approx(0.6)
    assert point.figures["gpu_hours"] == pytest.approx(2 * 2 / 3600)  # of steps, as ever
    table = point_table(compared(tmp_path))
    assert (cell(table, "GPU hours"), cell(table, "paid GPU hours"), cell(table, "in steps")) == ("0.00111", "2", "60%")


def test_a_killed_attempt_is_counted_to_its_last_sign_of_life(tmp_path: Path) -> None:
    path = tmp_path / "a"
    killed = record(1, T0, over=False, start=100.0, steps=200.0)
    point_with(path, killed, state="failed")
    for sign, seconds in ((None, 200.0), ("status", 230.0), ("heartbeat", 250.0)):
        if sign == "status":  # as the reaper leaves it
            status = json.loads((path / "status.json").read_text()) | {"updated": T0 + 330, "attempt": 1}
            (path / "status.json").write_text(json.dumps(status))
        if sign == "heartbeat":
            (path / "heartbeat").mkdir()
            (path / "heartbeat" / "trainer.0").write_text("ready")
            os.utime(path / "heartbeat" / "trainer.0", (T0 + 350, T0 + 350))
        (point,) = read_directory(tmp_path)
        assert paid(point).attempts[0].seconds == {"start": 100.0, "steps": seconds}
        assert paid(point).at_least
    result = compared(tmp_path)
    assert cell(point_table(result), "paid GPU hours") == "≥ 0.194"
    table = phase_table(result)
    assert (cell(table, "ended"), cell(table, "paid GPU hours")) == ("killed", "≥ 0.194")


def test_an_attempt_that_is_killed_at_its_end_was_longer_at_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a"
    point_with(path, record(1, T0, over=False, start=100.0, steps=200.0, end=5.0), state="failed")
    status = json.loads((path / "status.json").read_text()) | {"updated": T0 + 330, "attempt": 1}
    (path / "status.json").write_text(json.dumps(status))
    (point,) = read_directory(tmp_path)
    assert paid(point).attempts[0].seconds == {"start": 100.0, "steps": 200.0, "end": 30.0}


def test_a_phase_too_short_for_the_record_is_not_in_it(tmp_path: Path) -> None:
    hours = Hours(tmp_path, 1, lambda: True)
    hours.begin(1)
    hours.phases.totals["checkpoints"] = 0.0004
    hours.enter("steps")
    assert "checkpoints" not in read_hours(tmp_path, 1)[0].seconds


def test_requeued_twice_each_attempt_counts_and_the_queue_does_not(tmp_path: Path) -> None:
    attempts = [
        record(1, T0, start=60.0, steps=240.0, end=60.0),
        record(2, T0 + 5000, over=False, start=30.0, steps=70.0, devices=4),  # its node died
        record(3, T0 + 9000, start=60.0, steps=600.0, end=60.0),
    ]
    agent = [{"attempt": n, "job": "7", "started": row["began"] + 2} for n, row in enumerate(attempts, 1)]
    agent += [{"attempt": n, "ended": attempts[n - 1]["updated"] + 1, "exit_code": 0} for n in (1, 3)]
    point = point_with(tmp_path / "a", *attempts, agent=agent)
    hours = paid(point)
    assert [attempt.paid_s for attempt in hours.attempts] == [361, 100, 721]  # agents end a little later
    assert hours.killed == {2}
    assert point.figures["paid_gpu_hours"] == pytest.approx((2 * 361 + 4 * 100 + 2 * 721) / 3600)
    table = phase_table(compared(tmp_path))
    assert table.headings[-7:] == ["ended", "devices", "start", "steps", "end", "total", "paid GPU hours"]
    assert [row[1].text for row in table.rows] == ["1", "2", "3"]
    assert [row[-2].text for row in table.rows] == ["6:01", "1:40", "12:01"]


def test_a_point_that_still_runs_is_counted_so_far(tmp_path: Path) -> None:
    point = point_with(tmp_path / "a", record(1, T0, over=False, start=60.0, steps=240.0), state="running")
    assert paid(point).at_least, "its processes are gone"
    with living(tmp_path / "a"):
        (point,) = read_directory(tmp_path / "a")
        assert not paid(point).at_least
        assert cell(phase_table(compared(tmp_path)), "ended") == "not yet"


def test_attempts_that_never_told_of_themselves_are_known_by_their_agent(tmp_path: Path) -> None:
    agent = [{"attempt": 1, "started": T0, "job": "7"}, {"attempt": 1, "ended": T0 + 90, "class": "config"}]
    only = point_with(tmp_path / "a", agent=agent, state="failed", seed=1)
    assert (paid(only).attempts[0].seconds, paid(only).at_least) == ({"untold": 90.0}, False)
    assert only.figures["paid_gpu_hours"] == pytest.approx(2 * 90 / 3600)
    assert "in_steps" not in only.figures
    agent.append({"attempt": 2, "started": T0 + 100, "job": "7"})
    later = point_with(tmp_path / "b", record(2, T0 + 99, steps=50.0), agent=agent, seed=2)
    assert [(attempt.number, attempt.paid_s) for attempt in paid(later).attempts] == [(1, 90), (2, 50)]


def test_runs_without_records_have_no_such_columns(tmp_path: Path) -> None:
    point_with(tmp_path / "a")
    assert "paid GPU hours" not in point_table(compared(tmp_path)).headings
    assert phase_table(compared(tmp_path)).rows == []


def test_groups_have_the_mean_and_say_if_it_is_more(tmp_path: Path) -> None:
    point_with(tmp_path / "a", record(1, T0, steps=3600.0), seed=1)
    point_with(tmp_path / "b", record(1, T0, over=False, steps=1800.0), record(2, T0 + 3600, steps=1800.0), seed=2)
    assert cell(group_table(compared(tmp_path)), "paid GPU hours") == "≥ 2"


def test_files_hold_all_of_it(tmp_path: Path) -> None:
    point_with(tmp_path / "s" / "a", record(1, T0, start=60.0, compilation=30.0, steps=270.0), seed=1)
    done = command("s", "--phases", "--csv", "o.csv", "--json", "o.json", "--html", "o.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "compilation" in done.stdout
    assert "Phases, in time, sum up to total." in done.stdout
    (line,) = csv.DictReader((tmp_path / "o.csv").open())
    assert (line["paid_gpu_hours"], line["compilation_s"], line["waiting_s"]) == ("0.2", "30.0", "")
    (found,) = json.loads((tmp_path / "o.json").read_text())["groups"][0]["points"][0]["attempts"]
    assert (found["paid_s"], found["killed"], found["seconds"]["start"]) == (360.0, False, 60.0)
    assert "<h2>Phases</h2>" in (tmp_path / "o.html").read_text()


def test_a_wandb_group_tells_as_much_as_was_known_before_the_end(tmp_path: Path) -> None:
    point_with(tmp_path / "a", record(1, T0, start=60.0, steps=240.0), record(2, T0 + 999, steps=100.0))
    mirrored = MirroredRun(tmp_path / "a")
    mirrored.summary = summarise(tmp_path / "a")  # type: ignore[attr-defined]
    (theirs,), (ours,) = read_group("team/prl/rl", Api([mirrored])), read_directory(tmp_path)
    assert theirs.figures["paid_gpu_hours"] == pytest.approx(ours.figures["paid_gpu_hours"])
    assert paid(theirs).attempts[0].seconds == {"start": 60.0, "steps": 340.0}
    assert "in_steps" in ours.figures
    assert "in_steps" not in theirs.figures, "the end of the run is not in it"
    result = compare("wandb", [theirs], "steps")
    assert cell(point_table(result), "paid GPU hours") == "≥ 0.222"
    table = phase_table(result)
    assert (cell(table, "ended"), cell(table, "devices")) == ("not told", "2")


@pytest.mark.slow
def test_wandbs_copy_of_a_run_has_all_of_its_phases_but_the_end(tmp_path: Path) -> None:
    args = ["logging.wandb.mode=offline", "max_steps=3", "seq_len=64", "sft.batch_size=2", "ckpt.export_hf=false"]
    process = start([*args, f"output_dir={tmp_path}/run", f"cache_dir={tmp_path}/cache"], tmp_path, "prl.sft")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    ((ours,), _), ((theirs,), _) = read_targets([str(tmp_path / "run")]), read_targets([str(tmp_path / "run/wandb")])
    whole, copy = paid(ours).attempts[0].seconds, paid(theirs).attempts[0].seconds
    assert whole.keys() - {"end"} == copy.keys() - {"end"}
    assert all(copy[phase] == pytest.approx(whole[phase], abs=0.02) for phase in whole if phase != "end")
    assert paid(theirs).attempts[0].devices == 1
    assert paid(theirs).at_least
    assert theirs.figures["paid_gpu_hours"] <= ours.figures["paid_gpu_hours"]


# --- two points that need the same warm start -------------------------------------------------------------------------


@dataclass
class Ended:
    point: Point
    started: float  # Unix seconds: before its process was, and when it had ended
    ended: float


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> list[Ended]:
    """Two seeds at the same time, as if a third run were making their warm start, which gives up once both wait."""
    folder = tmp_path_factory.mktemp("pair")
    small = [arg for arg in SMALL if not arg.startswith("warm_start")]
    small += ["warm_start.max_steps=2", "warm_start.target_val_loss=0", "max_steps=2", "eval.interval=1"]
    args = [[*small, f"cache_dir={folder}/cache", f"seed={n}", f"output_dir={folder}/runs/{n}"] for n in (1, 2)]
    (folder / "plan").mkdir()
    planned = planned_as_json(["--json", *args[0]], folder)
    cached = warm_start_dir(plan_from_json(planned).config)
    cached.parent.mkdir(parents=True)
    third = Claim(cached)
    assert third.take()
    started, processes = [], []
    for arguments in args:
        started.append(time.time())
        processes.append(start(arguments, folder))
    try:
        for number in (1, 2):
            wait_for(lambda n=number: "warm_start_wait" in phases_of(folder / "runs" / str(n)), 120)  # type: ignore[misc]
        third.release()
        outputs = [process.communicate(timeout=240)[0] for process in processes]
        ended = time.time()
    finally:
        third.release()
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    points = read_directory(folder / "runs")
    return [Ended(point, began, ended) for point, began in zip(points, started, strict=True)]


def planned_as_json(args: list[str], cwd: Path) -> str:
    process = start(args, cwd, "prl.plan")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    return output


def phases_of(run_dir: Path) -> dict[str, float]:
    try:
        return json.loads((run_dir / "hours.json").read_text())["attempts"][0]["seconds"]
    except (OSError, ValueError):
        return {}


@pytest.mark.slow
def test_phases_sum_up_to_what_was_paid_from_the_start_of_the_process_to_its_end(pair: list[Ended]) -> None:
    for run in pair:
        (attempt,) = paid(run.point).attempts
        assert attempt.is_over
        assert attempt.paid_s == pytest.approx(attempt.updated - attempt.began, abs=0.1)
        assert run.started - 0.1 <= attempt.began
        status = json.loads((Path(run.point.config["output_dir"]) / "status.json").read_text())
        assert status["updated"] <= attempt.updated + 0.1 <= run.ended + 0.2
        assert attempt.began <= status["started"]


@pytest.mark.slow
def test_the_warm_start_is_paid_by_the_point_that_trained_it_and_the_other_waited(pair: list[Ended]) -> None:
    makers = [run.point for run in pair if "warm_start" in paid(run.point).attempts[0].seconds]
    assert len(makers) == 1
    (other,) = [run.point for run in pair if run.point not in makers]
    assert other.figures["in_steps"] > 0
    for run in pair:
        seconds = paid(run.point).attempts[0].seconds
        assert {"start", "warm_start_wait", "steps", "waiting", "evaluation", "end"} <= seconds.keys()
