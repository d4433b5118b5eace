"""Whole runs whose directory is deleted or moved away while they run: they end, and leave what lies there now alone."""

from __future__ import annotations

import shutil

import pytest
from runs import UNEVALUATED, finish, rows, start, wait_for_step

pytestmark = pytest.mark.slow

ENDLESS = ["max_steps=4000", "ckpt.interval=2"]


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_run_ends_when_its_directory_is_gone(tmp_path, how):
    run_dir, elsewhere = tmp_path / "a", tmp_path / "b"
    process = start([*UNEVALUATED, *ENDLESS, f"cache_dir={tmp_path}/cache", f"output_dir={run_dir}"], tmp_path)
    wait_for_step(process, run_dir, 3)
    if how == "moved":
        run_dir.rename(elsewhere)
    else:
        shutil.rmtree(run_dir, ignore_errors=True)
        shutil.rmtree(run_dir, ignore_errors=True)  # what the run has put there meanwhile
    done = finish(process)
    assert done.code == 2, done.output
    assert f"the run's directory was deleted or moved away while it ran\n  where: {run_dir}" in done.output
    assert "Traceback" not in done.output
    assert not (run_dir / "plan.json").exists()
    assert not (run_dir / "status.json").exists()


def test_its_place_may_be_another_runs_by_now(tmp_path):
    run_dir = tmp_path / "a"
    arguments = [*UNEVALUATED, f"cache_dir={tmp_path}/cache", f"output_dir={run_dir}", "ckpt.interval=9999"]
    first = start([*arguments, "max_steps=4000"], tmp_path)
    wait_for_step(first, run_dir, 3)
    run_dir.rename(tmp_path / "b")
    second = start([*arguments, "max_steps=6", "seed=5"], tmp_path)
    wait_for_step(second, run_dir, 1)
    (run_dir / ".lock").unlink()  # by who tidies up: no reason to end
    done = finish(first)
    assert done.code == 2, done.output
    done = finish(second)
    assert done.code == 0, done.output
    assert [row["step"] for row in rows(run_dir, "trainer.0")] == [1, 2, 3, 4, 5, 6]
