"""Whole runs whose checkpoints take longer to commit than anybody waits for: nothing is lost, nothing waits in vain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import UNEVALUATED, Moment, environment, finish, rows, wait_for_step
from runs import start as begin

from prl.runtime.directory.checkpoints import find_damage, parts_of

pytestmark = pytest.mark.slow

STOP_TIMEOUT_S = 6.0  # to get to the checkpoint; what is saved then takes longer
SLOW_S = 7.0
SMALL = ["seq_len=64", "sft.batch_size=2", "sft.val_interval=0", "logging=none", "ckpt.export_hf=false"]
SMALL.append("debug.num_threads=1")
# Python imports sitecustomize by itself, in every process of the tree
SITECUSTOMIZE = f"""
import time

import prl.runtime.directory.checkpoints as checkpoints
import prl.runtime.people.progress as progress

write, update = checkpoints._write_manifest, progress.Progress.update


def write_slowly(*arguments, **named):
    time.sleep({SLOW_S})
    return write(*arguments, **named)


def update_slowly(self, view, state):  # the root, as on a disk that is busy when the stop begins
    if state == "stopping" and not hasattr(self, "was_slow"):
        self.was_slow = time.sleep({STOP_TIMEOUT_S + 0.5})
    update(self, view, state)


checkpoints._write_manifest, progress.Progress.update = write_slowly, update_slowly
"""


def start(tmp_path: Path, *arguments: str, job: str) -> subprocess.Popen[str]:
    (tmp_path / "slow").mkdir(exist_ok=True)
    (tmp_path / "slow" / "sitecustomize.py").write_text(SITECUSTOMIZE)
    variables = environment()
    variables["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "slow"), variables["PYTHONPATH"]])
    limit = f"deployment.stop_timeout_s={STOP_TIMEOUT_S}"
    command = [sys.executable, "-m", f"prl.{job}", f"cache_dir={tmp_path}/cache", limit, *arguments]
    return subprocess.Popen(
        command, cwd=tmp_path, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def halves(run_dir: Path) -> dict[str, set[str]]:
    """Checkpoint -> its parts."""
    found = (run_dir / "checkpoints").iterdir()
    return {path.name: {part.name for part in path.iterdir() if part.is_dir()} for path in found}


def test_an_rl_run_keeps_both_halves_and_resumes_from_a_signals_checkpoint(tmp_path):
    run_dir = tmp_path / "a"
    arguments = [*UNEVALUATED, "ckpt.interval=2", "ckpt.keep=9", "max_steps=400", f"output_dir={run_dir}"]
    process = start(tmp_path, *arguments, job="rl")
    wait_for_step(process, run_dir, 4)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143, done.output
    saved = halves(run_dir)
    assert len(saved) >= 2
    assert set(map(frozenset, saved.values())) == {frozenset({"trainer", "orchestrator"})}, saved
    last = max(int(name.removeprefix("step_")) for name in saved)
    assert last == max(row["step"] for row in rows(run_dir, "trainer.0"))
    process = start(tmp_path, *arguments, job="rl")
    wait_for_step(process, run_dir, last + 1)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143, done.output
    assert f"resuming from the checkpoint of step {last}" in done.output
    steps = [row["step"] for row in rows(run_dir, "trainer.0")]
    assert steps == list(range(1, len(steps) + 1))


def test_a_stop_waits_for_its_checkpoint_though_the_root_is_slow(tmp_path):
    run_dir = tmp_path / "a"
    process = start(tmp_path, *SMALL, "ckpt.interval=100000", "max_steps=90000", f"output_dir={run_dir}", job="sft")
    wait_for_step(process, run_dir, 3)
    process.send_signal(signal.SIGTERM)
    done = finish(process)
    assert done.code == 143, done.output
    assert "did not stop in time" not in done.output
    last = max(row["step"] for row in rows(run_dir, "trainer.0"))
    assert halves(run_dir) == {f"step_{last}": {"trainer"}}


def test_training_goes_on_while_a_checkpoint_is_committed(tmp_path):
    run_dir = tmp_path / "a"
    arguments = [*SMALL, "ckpt.interval=5", "max_steps=20", f"output_dir={run_dir}", "ckpt.keep=9"]
    moment = Moment("manifest", tmp_path / "moment")  # of the first one
    process = begin([*arguments, f"cache_dir={tmp_path}/cache"], tmp_path, "prl.sft", env=moment.env)
    moment.wait(process)
    wait_for_step(process, run_dir, 9)  # though the checkpoint of step 5 is not committed
    assert not (run_dir / "checkpoints/step_5").exists()
    moment.go()
    done = finish(process)
    assert done.code == 0, done.output
    assert set(halves(run_dir)) == {"step_5", "step_10", "step_15", "step_20"}
    assert [find_damage(path, parts_of("sft")) for path in (run_dir / "checkpoints").iterdir()] == [None] * 4
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"
