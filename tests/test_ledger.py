"""The ledger of a sweep: whole lines from many processes, every way an attempt can fail, counts in prl.status."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from slurm_cluster import SMALL

import prl.status
from prl.runtime.directory.ledger import read_failures, summarise_failures
from prl.runtime.directory.status_file import StatusFile
from prl.status import render

WRITER = """
import sys
from pathlib import Path
from prl.runtime.directory.ledger import record_failure
point = Path(sys.argv[1])
for i in range(300):
    record_failure(point, attempt=i, kind="oom", message="é" * 2000, node="n0", job=None, requeued=False)
"""


def test_lines_of_points_that_fail_at_once_are_whole(tmp_path):
    points = [str(tmp_path / name) for name in "abcd"]
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, point]) for point in points]
    assert [writer.wait(240) for writer in writers] == [0] * 4
    rows = read_failures(tmp_path)
    assert sorted((row["point"], row["attempt"]) for row in rows) == [(p, i) for p in "abcd" for i in range(300)]


def test_a_torn_line_is_left_out(tmp_path):
    row = {"class": "node", "requeued": True}
    (tmp_path / "failures.jsonl").write_text(f'{json.dumps(row)}\n{{"class": "o\n{json.dumps(row)}\n')
    assert summarise_failures(tmp_path) == f"failed attempts: 2 node (2 requeued); see {tmp_path}/failures.jsonl"
    assert summarise_failures(tmp_path / "none") == ""


@pytest.mark.parametrize("end", ["done", None])
def test_a_run_that_ends_between_two_looks_is_not_lost(tmp_path, monkeypatch, end):
    run = tmp_path / "run"
    run.mkdir()
    (run / "plan.json").write_text('{"config": {}}')
    StatusFile(run, "p", "rl", "run", max_steps=3)

    def is_locked(path):
        if end:
            StatusFile(run, "p", "rl", "run", max_steps=3).update(state=end)
        return False

    monkeypatch.setattr(prl.status, "is_locked", is_locked)
    assert render(tmp_path)[0].splitlines()[1].split()[1] == (end or "lost")


def sweep(directory, *overrides):
    lines = [*SMALL, f"cache_dir={directory}/cache", "hydra/launcher=local", "sweep=s", *overrides]
    command = [sys.executable, "-m", "prl.sft", "-m", *lines]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
@pytest.mark.parametrize("at_a_time", [1, 2])
def test_failed_points_here_are_in_the_ledger(tmp_path, at_a_time):
    data = tmp_path / "broken.jsonl"
    data.write_text('{"messages": 3}\n')
    where = ["data=jsonl", f"sft.data.source={data}", f"hydra.launcher.parallel_points={at_a_time}"]
    done = sweep(tmp_path, *where, "seed=1,2")
    assert done.returncode == 1, done.stderr
    directory = tmp_path / "outputs/sweeps/s"
    rows = read_failures(directory)
    assert sorted(row["point"][:6] for row in rows) == ["seed-1", "seed-2"]
    assert {(row["attempt"], row["class"], row["job"], row["requeued"]) for row in rows} == {(1, "config", None, False)}
    assert all("broken.jsonl" in row["message"] for row in rows)
    assert "failed attempts: 2 config" in render(directory)[0]


@pytest.mark.slow
def test_an_attempt_that_never_told_its_end_is_told_by_the_next(tmp_path):
    assert sweep(tmp_path, "hydra.launcher.dry_run=true", "seed=1").returncode == 0
    directory = tmp_path / "outputs/sweeps/s"
    (plan,) = directory.glob("*/plan.json")
    start = {"attempt": 1, "job": "7_0", "node": "n3", "started": 0.0}
    (plan.parent / "attempts.jsonl").write_text(json.dumps(start) + "\n")
    done = subprocess.run([sys.executable, "-m", "prl.runtime.agent", str(plan.parent)], cwd=tmp_path)
    assert done.returncode == 0
    (row,) = read_failures(directory)
    assert [row[key] for key in ("attempt", "class", "node", "job", "requeued")] == [1, "node", "n3", "7_0", False]
