"""What an attempt spends its time on, from made rows of metrics; and the file that says so."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from prl.runtime.directory import hours as hours_module
from prl.runtime.directory.hours import Hours, allocated_devices, read_hours, summarise
from prl.runtime.directory.phases import END, KEPT, START, WARM_START, Phases


def spent(phases: Phases, now: float, ends: bool = False) -> dict[str, float]:
    return {phase: pytest.approx(seconds) for phase, seconds in phases.at(now, ends).items() if seconds}


def step(end: float, step_s: float, **parts: float) -> dict[str, float]:
    return {"time": end, "step_s": step_s} | parts


def test_stages_follow_each_other_without_a_gap() -> None:
    phases = Phases(100.0)
    phases.enter(WARM_START, 104.0)
    phases.enter(START, 110.0)
    assert spent(phases, 115.0) == {"start": 9, "warm_start": 6}  # the first step has not been told of
    phases.observe("trainer", step(120.0, 4.0))
    assert spent(phases, 121.0) == {"start": 10, "warm_start": 6, "steps": 5}  # with the one under way
    phases.enter(END, 123.0)
    assert spent(phases, 124.0) == {"start": 10, "warm_start": 6, "steps": 4, "end": 4}


def test_a_step_says_what_it_consists_of() -> None:
    phases = Phases(0.0)
    phases.observe("trainer", step(20.0, 10.0, wait_for_batch_s=3.0, compile_s=2.0, save_s=1.0))
    assert spent(phases, 20.0, ends=True) == {"start": 10, "waiting": 3, "compilation": 2, "checkpoints": 1, "steps": 4}


def test_of_supervised_steps_validation_is_a_part_and_saving_comes_between() -> None:
    phases = Phases(0.0)
    phases.observe("trainer", step(14.0, 4.0, val_s=1.0))
    phases.observe("trainer", step(20.0, 4.0))
    assert spent(phases, 22.0, ends=True) == {"start": 10, "evaluation": 1, "checkpoints": 2, "steps": 7, "end": 2}


def test_an_evaluation_counts_where_the_trainer_stands_still_for_it() -> None:
    phases = Phases(0.0)
    phases.observe("orchestrator", {"time": 13.0, "eval_s": 2.0})  # before the first step
    phases.observe("trainer", step(24.0, 10.0, wait_for_batch_s=4.0))  # waits from 14 to 18
    phases.observe("orchestrator", {"time": 20.0, "eval_s": 5.0})  # three of its seconds are waited for
    phases.observe("orchestrator", {"time": 30.0, "eval_s": 4.0})  # the last one
    assert spent(phases, 31.0, ends=True) == {
        "start": 12, "evaluation": 2 + 3 + 4, "waiting": 1, "steps": 6, "end": 3
    }  # fmt: skip


def test_rows_of_an_earlier_attempt_and_of_clocks_that_differ_change_no_sum() -> None:
    phases = Phases(1000.0)
    phases.enter(START, 1010.0)
    phases.observe("trainer", step(900.0, 50.0))
    phases.observe("trainer", step(1012.0, 40.0, wait_for_batch_s=99.0, save_s=77.0))
    phases.observe("trainer", step(1011.0, 1.0))
    phases.observe("trainer", {"time": "x", "step_s": 1})
    phases.observe("trainer", step(1015.0, float("nan")))
    assert sum(phases.at(1020.0).values()) == pytest.approx(20)
    assert phases.at(1020.0)["start"] == 10


def test_long_runs_are_summed_up_on_the_way() -> None:
    phases = Phases(0.0)
    for number in range(1, 1001):
        phases.observe("trainer", step(10.0 * number, 10.0, wait_for_batch_s=2.0))
        if number % 10 == 0:
            phases.observe("orchestrator", {"time": 10.0 * number - 8.0, "eval_s": 1.0})
    assert len(phases.intervals) <= KEPT
    assert spent(phases, 10_000.0) == {"steps": 8000, "waiting": 1900, "evaluation": 100}


# --- the file ---------------------------------------------------------------------------------------------------------


def make_hours(run_dir: Path, **more: Any) -> Hours:
    return Hours(run_dir, 2, lambda: True, **more)


def test_attempts_are_kept_and_one_that_was_killed_is_as_it_was_last_seen(tmp_path: Path) -> None:
    killed = make_hours(tmp_path)
    killed.begin(1)
    killed.enter(WARM_START)
    second = make_hours(tmp_path)
    second.begin(2)
    second.phases.observe("trainer", {"time": time.time() - 0.01, "step_s": 0.0})  # what takes no time is not told
    second.roles_end()
    second.close()
    first, last = read_hours(tmp_path, None)
    assert (first.number, first.is_over, last.number, last.is_over) == (1, False, 2, True)
    assert last.updated - last.began == pytest.approx(last.paid_s, abs=0.01)
    assert (last.devices, last.job, last.seconds.keys()) == (2, None, {"start", "end"})
    summary = summarise(tmp_path)
    assert summary["paid/gpu_hours"] == pytest.approx(2 * (first.paid_s + last.paid_s) / 3600)


def test_a_process_pays_from_its_start_and_a_second_run_in_it_from_the_end_of_the_first(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(hours_module, "_ended_before", 0.0)
    monkeypatch.setattr(hours_module, "seconds_since_start", lambda: 50.0)
    now = time.time()
    first = make_hours(tmp_path)
    assert first.attempt.began == pytest.approx(now - 50, abs=20)
    first.close()
    assert make_hours(tmp_path).attempt.began >= now


def test_a_job_of_its_own_pays_from_the_jobs_start_and_for_what_it_was_given(tmp_path, monkeypatch) -> None:
    began = str(int(time.time()) - 5000)
    for name, value in {"JOB_START_TIME": began, "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "8", "JOB_ID": "7"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("ARRAY_JOB_ID", "ARRAY_TASK_ID"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    mine, others = make_hours(tmp_path, own_job=True).attempt, make_hours(tmp_path).attempt
    assert (mine.began, mine.devices, mine.job) == (float(began), 16, "7")
    assert (others.began > float(began), others.devices, others.job) == (True, 2, None)
    monkeypatch.setenv("SLURM_JOB_START_TIME", "soon")
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    assert make_hours(tmp_path, own_job=True).attempt.began > float(began)
    assert allocated_devices() is None


@pytest.mark.parametrize("content", ["{", "[]", '{"attempts": 3}', '{"attempts": [3, {"number": 1}, {"seconds": {}}]}'])
def test_a_damaged_file_costs_what_it_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "hours.json").write_text(content)
    assert read_hours(tmp_path, 2) == []
    hours = make_hours(tmp_path)
    hours.begin(3)
    assert [row["number"] for row in json.loads((tmp_path / "hours.json").read_text())["attempts"]] == [3]
