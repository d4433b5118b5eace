"""A run that is refused before it takes its directory: who looks at that is told why."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.states import state_in
from prl.compare.points import read_directory
from prl.config import compose
from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.planning import make_plan
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import StatusFile, read_status
from prl.runtime.launch import run
from prl.runtime.process import gpus
from prl.status import render


def frozen(path: Path) -> RunConfig:
    """A point of a sweep, or a run that was tried before, with a tokenizer that is not there any more."""
    config = compose(["warm_start=none", "model.tokenizer=/nowhere/at/all", f"output_dir={path}"])
    claim(make_plan(config)).release()
    return config


def refuse(config: RunConfig) -> None:
    with pytest.raises(UserError, match="no tokenizer"):
        run(config)


def test_the_cause_is_in_the_status_of_a_run_that_has_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "s/point"
    config = frozen(path)
    refuse(config)
    assert "config: root: there is no tokenizer" in render(tmp_path / "s")[0]
    assert "do:    model.tokenizer=null" in render(path)[0] or "do:    model.tokenizer=byte" in render(path)[0]
    assert read_directory(tmp_path)[0].why.startswith("config: root: there is no tokenizer")
    assert state_in(path) == "refused"
    refuse(config)
    assert read_status(path)["attempt"] == 2


def test_what_an_earlier_attempt_has_reached_stays(tmp_path: Path) -> None:
    config = frozen(tmp_path / "run")
    status = StatusFile(tmp_path / "run", make_plan(config).point_id, "rl", "rl", 9)
    status.update(state="stopped", step=5, saved=4)
    refuse(config)
    found = read_status(tmp_path / "run")
    assert (found["state"], found["step"], found["saved"], found["began"]) == ("failed", 5, 4, False)
    assert state_in(tmp_path / "run") == "refused"
    status.update(state="done")
    refuse(config)
    assert read_status(tmp_path / "run")["state"] == "done"


def test_directories_of_others_and_of_the_living_are_left_alone(tmp_path: Path) -> None:
    config = frozen(tmp_path / "run")
    alive = claim(make_plan(config))
    refuse(config)
    alive.release()
    refuse(config.model_copy(update={"seed": 7}))  # another point, with the same directory
    refuse(config.model_copy(update={"output_dir": str(tmp_path / "new")}))
    assert not (tmp_path / "run/status.json").exists()
    assert not (tmp_path / "new").exists()


def test_too_few_gpus_are_told_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda: ["0"])
    layout = ["deployment.device=cuda", "deployment.num_train_gpus=4"]
    config = compose(["warm_start=none", *layout, f"output_dir={tmp_path / 'run'}"])
    claim(make_plan(config)).release()
    with pytest.raises(UserError, match="GPUs are needed"):
        run(config)
    assert "GPUs are needed" in read_status(tmp_path / "run")["failure"]["message"]
