"""A wandb group gives the same comparison as the run directories that were mirrored into it.

The api object is a stand-in with wandb's public interface (runs, config, state, scan_history): there is no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests
from test_compare import make_point
from wandb.errors import AuthenticationError, CommError

from prl.compare.__main__ import main
from prl.compare.points import read_directory
from prl.compare.ranking import compare
from prl.compare.targets import read_targets
from prl.compare.wandb_source import read_group
from prl.config.errors import UserError
from prl.metrics.reader import read_rows
from prl.metrics.wandb_mirror import chart, run_settings
from prl.planning.run_plan import plan_from_json


@dataclass
class MirroredRun:
    """A run of the API: config and history as `prl.metrics.wandb_mirror` sends them."""

    path: Path
    state: str = "finished"
    sent_twice: bool = False

    def __post_init__(self) -> None:
        settings = run_settings(plan_from_json((self.path / "plan.json").read_text()), self.path.name)
        self.name, self.id, self.config = settings["name"], settings["id"], settings["config"] | {"_wandb": {}}
        self.group, self.project = settings["group"], settings["project"]

    def scan_history(self) -> list[dict[str, Any]]:
        rows = [chart(stem, row) for stem in ("orchestrator", "trainer.0") for row in read_rows(self.path, stem)]
        if self.sent_twice:  # the rows beyond a checkpoint, before the run was killed and went on from there
            lost = [{key: value if key == "step" else 99.0 for key, value in row.items()} for row in rows]
            rows = [*lost, *rows]
        return [{"_step": i, "_runtime": 1.0, "env.x/whatever": None, **row} for i, row in enumerate(rows)]


@dataclass
class Api:
    found: list[MirroredRun]

    def runs(self, path: str, filters: dict[str, Any]) -> list[MirroredRun]:
        if path.rpartition("/")[2] != "prl":
            raise ValueError(f"Could not find project {path}")
        return [run for run in self.found if run.group == filters["group"]]


def make_sweep(directory: Path) -> list[Path]:
    return [
        make_point(directory / f"{algo}{seed}", [0.0, 0.1, reward + seed / 50], algo=algo, seed=seed)
        for algo, reward in (("default", 0.5), ("grpo", 0.2))
        for seed in (1, 2)
    ]


@pytest.mark.parametrize("axis", ["steps", "tokens", "gpu_hours"])
def test_a_group_gives_what_its_directories_give(tmp_path: Path, axis: Any) -> None:
    runs = [MirroredRun(path) for path in make_sweep(tmp_path)]
    theirs = compare("rl", read_group("team/prl/rl", Api(runs)), axis)
    ours = compare("rl", read_directory(tmp_path), axis)
    assert theirs.columns == ours.columns == ["algo", "seed"]
    assert theirs.budget == pytest.approx(ours.budget)
    assert [(g.key, g.values, g.verdict, g.p) for g in theirs.groups] == [
        (g.key, g.values, g.verdict, g.p) for g in ours.groups
    ]
    for point, same in zip(theirs.points, ours.points, strict=True):
        assert point.curves is not None
        assert same.curves is not None
        assert point.curves.figures == pytest.approx(same.curves.figures)
        assert (point.state, point.point_id, point.step) == (same.state, same.point_id, same.step)


def test_steps_that_a_resumed_run_sent_twice_count_once(tmp_path: Path) -> None:
    (path, *_) = make_sweep(tmp_path)
    once, twice = (read_group("rl", Api([MirroredRun(path, sent_twice=s)]))[0].curves for s in (False, True))
    assert once == twice


def test_runs_that_have_not_finished_are_shown_and_not_ranked(tmp_path: Path) -> None:
    first, second, third, _ = make_sweep(tmp_path)
    runs = [MirroredRun(first), MirroredRun(second, "running"), MirroredRun(third, "crashed")]
    result = compare("rl", read_group("rl", Api(runs)), "steps")
    assert sorted(point.state for point in result.points) == ["crashed", "done", "running"]
    assert len(result.ranked) == 1


@pytest.mark.parametrize(("target", "said"), [("nothing", "no run in group nothing"), ("x/y/rl", "no project x/y")])
def test_mistakes(tmp_path: Path, target: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_group(target, Api([]))


REFUSALS = [
    AuthenticationError("Failed to verify credentials\nand more"),
    CommError("busy"),
    requests.ConnectionError("no network"),
    RuntimeError("whatever its service process says"),
]


@pytest.mark.parametrize("error", REFUSALS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("when", ["connect", "runs", "scan_history"])
def test_a_wandb_that_refuses_or_is_away_is_told_without_a_traceback(
    tmp_path, monkeypatch, capsys, error, when
) -> None:
    def refuse(*given: Any, **named: Any) -> Any:
        raise error

    api = Api([MirroredRun(make_sweep(tmp_path)[0])])
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr("wandb.Api", refuse if when == "connect" else lambda: api)
    monkeypatch.setattr(MirroredRun if when == "scan_history" else Api, when, refuse, raising=False)
    monkeypatch.setattr("sys.argv", ["prl.compare", "team/prl/rl"])
    with pytest.raises(SystemExit) as caught:
        main()
    said = capsys.readouterr().err
    assert caught.value.code == 2
    assert said.startswith(f"wandb could not be asked for team/prl/rl: {str(error).splitlines()[0]}\n")
    assert "wandb login" in said
    assert "Traceback" not in said


def test_a_netrc_that_cannot_be_read_holds_no_key(tmp_path, monkeypatch) -> None:
    (tmp_path / ".netrc").write_bytes(b"\xff machine")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    for home in (tmp_path, tmp_path / ".netrc"):  # bytes that are no text; a home that is a file
        monkeypatch.setenv("HOME", str(home))
        with pytest.raises(UserError, match="wandb cannot be asked for a group of that name"):
            read_targets(["team/prl/rl"])
