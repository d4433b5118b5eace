"""The wandb mirror for real: a run with the mirror in its tree, offline, read back from wandb's own file."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest
from runtime_tree import Root, wait_for

from prl.compare import wandb_source
from prl.compare.points import read_directory
from prl.compare.wandb_file import find_files, read_files

SCRIPT = {"orchestrator": {"step_s": 0.1}, "trainer/0": {"step_s": 0.1}}


@pytest.mark.slow
def test_all_of_a_run_is_in_one_wandb_run_also_after_a_resume(tmp_path: Path) -> None:
    overrides = ("logging.wandb.mode=offline", "max_steps=30")
    before = set(Path(tempfile.gettempdir()).glob("*wandb-*"))
    slow = {name: {"step_s": 0.1, "stay_at": 12} for name in SCRIPT}  # the mirror takes seconds to come up
    root = Root(tmp_path / "run", *overrides, script=slow)
    try:
        wait_for(lambda: (root.run_dir / "wandb" / "sent.json").exists())
        root.process.send_signal(signal.SIGTERM)
        assert root.wait()[0] == 143
        (root.run_dir / "stop").unlink()
    finally:
        root.end()
    again = Root(tmp_path / "run", *overrides, script={name: {"step_s": 0.4} for name in SCRIPT})  # as above
    try:
        code, output = again.wait()
        assert code == 0, output
    finally:
        again.end()
    files = find_files(tmp_path / "run" / "wandb")
    assert len(files) == 2
    assert set(Path(tempfile.gettempdir()).glob("*wandb-*")) == before, "directories of wandb's are left"
    assert not (tmp_path / "run" / "wandb" / "tmp").exists()
    (mirrored,) = read_files(files)
    rewards = [row["step"] for row in mirrored.history if "orchestrator/reward" in row]
    assert rewards == list(range(1, 31))
    (point,) = [wandb_source.read_run(mirrored)]
    (own,) = read_directory(tmp_path / "run")
    assert (point.run_id, point.state, point.step, point.job) == (own.run_id, "done", own.curves.steps[-1], "rl")
    assert point.curves.figures == pytest.approx(own.curves.figures)


@pytest.mark.slow
def test_losing_the_mirror_does_not_end_the_run(tmp_path: Path) -> None:
    root = Root(tmp_path / "run", "logging.wandb.mode=offline", "max_steps=1000", script=SCRIPT)
    try:
        root.await_step(2)
        os.kill(root.pid_of("wandb"), signal.SIGKILL)
        wait_for(lambda: "wandb" not in root.status()["roles"])
        root.await_step(max(root.rows_written().values()) + 2)
        root.process.send_signal(signal.SIGTERM)
        code, output = root.wait()
        assert code == 143, output
        assert "the wandb mirror ended, the run goes on" in output
        root.await_gone()
    finally:
        root.end()
