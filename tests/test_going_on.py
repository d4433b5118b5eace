"""Whether a point that failed is tried again by its sweep's command, and what makes it: said wherever it is shown."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
from watch_directory import make_run

from launch.points import is_to_start
from launch.settings import LauncherSettings
from launch.states import state_in
from prl.compare.targets import read_targets
from prl.config import compose
from prl.config.errors import UserError
from prl.planning import make_plan
from prl.runtime.directory.files import as_user_error
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import StatusFile
from prl.runtime.launch import _conclude
from prl.runtime.process.failures import Failure, classify, error_record, parse_error_record
from prl.runtime.process.signals import StopSignals
from prl.runtime.supervisor import Outcome
from prl.status import render

CLASSES = {  # of failures after training began -> whether the sweep's command tries again by itself
    **dict.fromkeys(("node", "hang", "collective"), True),
    **dict.fromkeys(("oom", "config", "env", "diverged", "code"), False),
}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_fills_up_while_a_role_trains_may_pass(tmp_path: Path, number: int) -> None:
    told = as_user_error(OSError(number, "no space", str(tmp_path / "x")), tmp_path)
    assert told is not None
    assert classify("trainer", 2, parse_error_record(error_record(told)), (), 0) == "node"
    lasting = as_user_error(IsADirectoryError(errno.EISDIR, "is a directory", "x"), tmp_path)
    assert lasting is not None
    assert classify("trainer", 2, parse_error_record(error_record(lasting)), (), 0) == "config"


@pytest.mark.parametrize(("kind", "again"), CLASSES.items())
def test_status_and_compare_say_what_the_sweeps_command_does(tmp_path: Path, kind: str, again: bool) -> None:
    run = make_run(tmp_path / "s/point", {"seed": "1"}, state="failed")
    (tmp_path / "s/sweep.json").write_text(json.dumps({"points": [{"dir": "point", "point_id": "p"}]}))
    status = json.loads((run / "status.json").read_text())
    status |= {"began": True, "failure": {"class": kind, "role": "trainer/0", "message": "m"}}
    (run / "status.json").write_text(json.dumps(status))
    assert is_to_start(state_in(run), LauncherSettings()) == again
    said = "may pass: point; the sweep's command tries again" if again else "hydra.launcher.retry_failed=true in the"
    _, notes = read_targets([str(tmp_path / "s")])
    for text in (render(tmp_path / "s")[0], " ".join(notes)):
        assert said in text
        assert ("retry_failed" in text) != again
    alone = render(run)[0].splitlines()[-1]
    assert alone.startswith(
        "it may pass: " if again else "it would fail again as it is: hydra.launcher.retry_failed=true"
    )
    assert alone.endswith(f"this point alone: python -m prl.runtime.agent {run}")


@pytest.mark.parametrize("sweep", ["s", None])
@pytest.mark.parametrize(("kind", "again"), [("node", True), ("code", False)])
def test_the_end_of_a_run_says_which_command_goes_on(tmp_path, capsys, kind, again, sweep) -> None:
    config = compose(["warm_start=none", f"output_dir={tmp_path / 's/run'}"]).model_copy(update={"sweep": sweep})
    plan = make_plan(config)
    run_dir = claim(plan)
    failure = Failure(kind, "trainer/0", 0, 0, "oh no", "", (), {"what": "w", "where": "", "why": "", "fix": ""})
    status = StatusFile(run_dir.path, plan.point_id, "rl", "rl", 9)
    status.update(state="failed", step=5, began=True, failure=failure.to_status())
    with pytest.raises(UserError):
        _conclude(plan, run_dir, Outcome("failed", 5, failure), StopSignals())
    run_dir.release()
    said = capsys.readouterr().err
    assert said.startswith("there is no checkpoint yet; the s")
    if sweep is None:
        assert f"the same command with output_dir={run_dir.path} goes on" in said
    else:
        told = "goes on" if again else ", only with hydra.launcher.retry_failed=true, goes on"
        assert f"the sweep's command{' ' if again else ''}{told}; for this point alone" in said
