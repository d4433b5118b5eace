"""`prl.eval` of a run that goes on: its checkpoints may be dropped while one is read."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest
from test_evaluator import make_run

from prl.config import compose
from prl.config.errors import UserError
from prl.planning.planner import make_plan
from prl.runtime import policy_stage
from prl.trainer import checkpoint_reader


def test_a_checkpoint_that_its_run_drops_while_it_is_read_is_told_and_the_last_is_looked_for_again(
    tmp_path, monkeypatch
):
    run = make_run(tmp_path / "run", (2, 4), "stopped")
    with pytest.raises(UserError, match="step 4 was dropped while it was read") as refused:
        raise checkpoint_reader.dropped(run, 4)
    assert "eval.step=last" in refused.value.fix
    asked: list[int] = []

    def read(plan, stage_dir, home):
        step = policy_stage.read_source(stage_dir.parent)["step"]
        asked.append(step)
        if step == 4:  # as the run's next checkpoint lets it go
            shutil.rmtree(run / "checkpoints/step_4")
            return SimpleNamespace(state="failed", failure={})
        return SimpleNamespace(state="done", failure=None)

    monkeypatch.setattr(policy_stage, "_run_stage", read)
    home = SimpleNamespace(progress=SimpleNamespace(note=lambda text: None))
    out = tmp_path / "evaluation"
    for step in ("last", 2):
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        plan = make_plan(compose([f"eval.run={run}", f"eval.step={step}", f"output_dir={out}"], "eval"))
        (out / "env.json").write_text("{}")
        path, outcome = policy_stage.prepare_policy(plan, out, home)
        assert (path, outcome.state) == (str(out / policy_stage.CONVERTED), "done")
    assert asked == [4, 2, 2]


def test_the_reader_says_that_it_was_dropped(tmp_path):
    """And not what it found no file for."""
    run, out = make_run(tmp_path / "run", (2, 4), "stopped"), tmp_path / "evaluation" / policy_stage.STAGE
    out.mkdir(parents=True)
    source = {"run": str(run), "step": 4, "path": None}
    (out.parent / policy_stage.SOURCE).write_text(json.dumps(source))
    ctx = SimpleNamespace(ready=lambda: None, beat=lambda: None, run_dir=out)
    shutil.rmtree(run / "checkpoints/step_4")
    with pytest.raises(UserError, match="was dropped while it was read"):
        checkpoint_reader.main(ctx)
