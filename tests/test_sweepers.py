"""Sweepers that learn from results: Optuna's, and one of a few lines that asks for them as Optuna does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from slurm_cluster import SMALL, SMALL_RL

from launch import waiting
from launch.hydra_plugin import refuse_objectives
from launch.launching import launch_points
from launch.points import Point
from launch.session import Session
from launch.settings import LauncherSettings
from launch.waiting import outcome, wait_for
from prl.config import compose
from prl.config.composing import compose_yaml
from prl.config.errors import ConfigError, PointFailedError, UserError
from prl.config.sweep import corners, expand, sweep_lines
from prl.metrics.writer import MetricsWriter
from prl.planning.planner import make_plan

# Two rounds of two points; a round's winner is a point of the next, and it names one point twice.
SWEEPER = """\
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper


class Climber(Sweeper):
    def __init__(self, params=None, max_batch_size=None):
        pass

    def setup(self, *, hydra_context, task_function, config):
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

    def sweep(self, arguments):
        fixed = [line for line in arguments if not line.startswith("optim.lr=")]
        best = 0.001
        for factor in (10, 3):
            rates = [best, best * factor, best]
            results = self.launcher.launch([[*fixed, f"optim.lr={rate}"] for rate in rates], 0)
            losses = [result.return_value for result in results]
            print("LOSSES", losses, flush=True)
            best = rates[losses.index(min(losses))]
"""


# what a sweeper learns from: held-out loss, held-out reward
JUDGED = {
    "sft": [*SMALL, "sft.val_interval=2", "sft.val_rows=2"],
    "rl": [*(line for line in SMALL_RL if line != "eval=none"), "max_steps=2", "eval.num_tasks=4"],
}


def run(
    directory: Path, *overrides: str, launcher: str = "local", job: str = "sft"
) -> subprocess.CompletedProcess[str]:
    package = directory / "plugins" / "hydra_plugins" / "climber"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(SWEEPER)
    path = os.pathsep.join([str(package.parent.parent), str(Path(__file__).parent.parent)])
    lines = [*JUDGED[job], f"cache_dir={directory}/cache", "sweep=s", *overrides]
    return subprocess.run(
        [sys.executable, "-m", f"prl.{job}", "-m", f"hydra/launcher={launcher}", *lines],
        cwd=directory,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=800,
    )


CLIMBER = "hydra.sweeper._target_=hydra_plugins.climber.Climber"


def losses_of(done: subprocess.CompletedProcess[str]) -> list[list[float]]:
    return [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("LOSSES ")]


def check_climb(directory: Path, done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stderr
    first, second = losses_of(done)
    assert first[0] == first[2]
    assert second[0] == min(first), "the point of the first round was not run again"
    assert done.stderr.count("done already") == 1
    assert len(list((directory / "outputs/sweeps/s").glob("*/status.json"))) == 3


@pytest.mark.slow
def test_a_sweeper_is_given_results(tmp_path):
    done = run(tmp_path, CLIMBER, "optim.lr=interval(0.001,0.03)")
    check_climb(tmp_path, done)
    slow, fast, _ = losses_of(done)[0]
    assert fast < slow, "a rate of 0.01 learns more in four steps than 0.001"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
def test_a_sweeper_is_given_results_of_jobs(tmp_path):
    check_climb(tmp_path, run(tmp_path, CLIMBER, "optim.lr=interval(0.001,0.03)", launcher="slurm", job="rl"))


@pytest.mark.slow
def test_a_failed_point_has_no_result(tmp_path):
    data = tmp_path / "broken.jsonl"
    data.write_text('{"messages": 3}\n')
    done = run(tmp_path, CLIMBER, "optim.lr=interval(0.001,0.03)", "data=jsonl", f"sft.data.source={data}")
    assert done.returncode == 1
    assert "has no result" in done.stderr
    assert "config: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("state", ["done", "failed", "stopped"])
def test_only_a_point_that_is_done_has_a_value(tmp_path, state):
    config = compose(["seed=1"], "sft").model_copy(update={"output_dir": str(tmp_path)})
    (tmp_path / "metrics").mkdir()
    rows = [{"step": 1, "val_loss": 3.0}, {"step": 2, "val_loss": 2.0}, {"step": 3, "loss": 1.0}]
    (tmp_path / "metrics/trainer.0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    failure = {"class": "code", "message": "nan"} if state == "failed" else None
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "failure": failure}))
    result = outcome(Point(("seed=1",), make_plan(config)))
    if state == "done":
        assert result == 2.0
    else:
        assert isinstance(result, PointFailedError)
        assert result.why == ("code: nan" if state == "failed" else "it is stopped")


@pytest.mark.parametrize(("failed", "reward"), [(0, 0.9), (1, 0.9), (2, 0.9), (16, None)])
def test_an_evaluation_that_lost_rollouts_is_no_value(tmp_path, failed, reward):
    config = compose(["seed=1"], "rl").model_copy(update={"output_dir": str(tmp_path)})
    counts = {"eval/failed_rollouts": failed, "eval/outcome/ok": 16 - failed, "eval/outcome/environment": failed}
    MetricsWriter(tmp_path, "orchestrator").log(step=0, **{"eval/reward": 0.1})
    MetricsWriter(tmp_path, "orchestrator").log(step=9, **{"eval/reward": reward}, **counts)
    (tmp_path / "status.json").write_text(json.dumps({"state": "done"}))
    result = outcome(Point(("seed=1",), make_plan(config)))
    if failed < 2:  # a tenth
        assert result == 0.9
    else:
        assert isinstance(result, PointFailedError)
        assert result.why == f"{failed} of 16 rollouts of its last evaluation failed and count for nothing"


@pytest.mark.slow
def test_a_dry_run_shows_the_first_points_of_a_sweeper(tmp_path):
    done = run(tmp_path, CLIMBER, "optim.lr=interval(0.001,0.03)", "hydra.launcher.dry_run=true")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("by hand:") == 2
    assert "when these have results" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("launcher", "job"),
    [
        pytest.param("local", "sft", marks=pytest.mark.exhaustive),
        pytest.param("slurm", "rl", marks=pytest.mark.slurm),
    ],
)
def test_optuna(tmp_path, launcher, job, request):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason='pip install -e ".[optuna]"')
    if launcher == "slurm":
        request.getfixturevalue("slurm")
    study = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=3",
        "hydra.sweeper.n_jobs=2",
        "hydra.sweeper.sampler.seed=1",
    ]
    done = run(tmp_path, *study, "optim.lr=tag(log,interval(0.0001,0.01))", launcher=launcher, job=job)
    assert done.returncode == 0, done.stderr
    points = list((tmp_path / "outputs/sweeps/s").glob("*/status.json"))
    assert len(points) == 3
    result = (tmp_path / "outputs/sweeps/s/optimization_results.yaml").read_text()
    rates = [path.parent.name.split("-")[1] for path in points]
    assert sum(f"optim.lr: {rate}" in result for rate in rates) == 1, (rates, result)


def test_what_a_sweeper_could_choose_is_checked_at_its_ends():
    lines = ["seed=range(100)", "optim.lr=tag(log,interval(0.001,0.1))", "memory=none,tight", "max_steps=3"]
    points = corners(lines)
    assert points[0] == ["seed=0", "optim.lr=0.001", "memory=none", "max_steps=3"]
    assert points[20:] == [
        ["seed=0", "optim.lr=0.1", "memory=none", "max_steps=3"],
        ["seed=0", "optim.lr=0.001", "memory=tight", "max_steps=3"],
    ]
    assert points[19][0] == "seed=99"
    with pytest.raises(UserError, match="hydra/sweeper=optuna"):
        expand(lines)


def test_a_queue_that_does_not_answer_for_a_while_is_asked_again(tmp_path, monkeypatch):
    """squeue fails twice, then knows the job, twice, then not any more."""
    squeue = tmp_path / "bin" / "squeue"
    squeue.parent.mkdir()
    squeue.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/calls\nn=$(wc -l < {tmp_path}/calls)\n"
        "[ $n -le 2 ] && { echo 'error: Unable to contact slurm controller' >&2; exit 1; }\n"
        "[ $n -le 3 ] && echo 7 RUNNING\n[ $n = 4 ] && echo 7 PENDING\nexit 0\n"
    )
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{squeue.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(waiting, "POLL_S", 0.01)
    point = tmp_path / "point"
    sweep = {"name": "s", "commands": [], "points": [], "submissions": []}
    sweep["submissions"].append({"job_id": "7", "is_array": False, "points": ["point"]})
    (tmp_path / "sweep.json").write_text(json.dumps(sweep))
    wait_for([point], tmp_path, on_slurm=True)
    assert len((tmp_path / "calls").read_text().splitlines()) == 5
    (tmp_path / "calls").unlink()
    monkeypatch.setattr(waiting, "PATIENCE_S", 0.0)
    with pytest.raises(UserError, match="Unable to contact"):
        wait_for([point], tmp_path, on_slurm=True)


@pytest.mark.parametrize(
    ("job", "overrides", "fix"),
    [
        ("rl", ["eval=none"], "eval.interval=10"),
        ("rl", ["eval.interval=50", "eval.at_end=false", "max_steps=20"], "eval.interval=10"),
        ("rl", [], ""),
        ("rl", ["eval.interval=50", "max_steps=20"], ""),
        ("sft", ["sft.val_interval=0"], "sft.val_interval=10"),
        ("sft", [], ""),
    ],
)
def test_points_without_a_value_are_refused_before_they_train(tmp_path, job, overrides, fix):
    config = compose(overrides, job).model_copy(update={"output_dir": str(tmp_path)})
    points = [Point(tuple(overrides), make_plan(config))]
    if not fix:
        return waiting.refuse_without_objective(points)
    with pytest.raises(ConfigError, match="learns from results would get none") as refused:
        waiting.refuse_without_objective(points)
    assert fix in refused.value.violations[0].fix


@pytest.mark.parametrize(
    ("line", "fix"),
    [("hydra.sweeper.n_trails=2", "hydra.sweeper.n_trials=..."), ("hydra.sweeper.nothing=1", "one of hydra.sweeper.")],
)
def test_a_key_that_the_sweeper_has_not_is_told_with_those_that_it_has(line, fix):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason='pip install -e ".[optuna]"')
    with pytest.raises(ConfigError, match="The sweeper has no key") as refused:
        compose_yaml(["hydra/sweeper=optuna", line])
    assert refused.value.violations[0].fix.startswith(fix)


def test_axes_of_a_sweeper_are_no_object_on_a_command_line():
    with pytest.raises(ConfigError, match=r"hydra\.sweeper\.params is for files") as refused:
        sweep_lines(['+hydra.sweeper.params={optim.lr: "interval(1e-4,1e-3)"}'], "rl")
    assert "+sweep=NAME" in refused.value.violations[0].fix


def test_a_sweeper_that_wants_several_numbers_is_refused():
    refuse_objectives(OmegaConf.create({"direction": "maximize"}))
    refuse_objectives(OmegaConf.create({}))
    with pytest.raises(ConfigError, match="one number to learn from, not 2") as refused:
        refuse_objectives(OmegaConf.create({"direction": ["minimize", "maximize"]}))
    assert refused.value.violations[0].fix == "hydra.sweeper.direction=minimize"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["hydra.sweeper.n_trials=0", "optim.lr=interval(0.001,0.01)"], "No trials are completed yet"),
        (["hydra.sweeper.direction=up", "optim.lr=interval(0.001,0.01)"], "Please set either"),
        (["optim.lr=interval(0.01,0.001)"], "must be smaller"),
    ],
)
def test_what_a_sweeper_refuses_is_told_in_its_words(tmp_path, words, why):
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason='pip install -e ".[optuna]"')
    done = run(tmp_path, "hydra/sweeper=optuna", *words)
    assert done.returncode == 2, done.stderr
    assert why in done.stderr
    assert "hydra/sweeper, hydra_optuna_sweeper" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_launcher_asks_for_values_and_for_places_before_anything_starts(tmp_path, capsys):
    """A sweeper that learns is refused where it would learn nothing; points are found under other names."""
    settings, sweep = LauncherSettings(mode="local", dry_run=True), tmp_path / "s"
    lines = [("seed=1", "optim.lr=0.5", "eval=none")]
    session = Session(lambda config: 0, swept={"seed", "optim.lr"})
    with pytest.raises(ConfigError, match="learns from results would get none"):
        launch_points(session, lines, sweep, settings, waits=True)
    (config,) = session.configs_of(lines, sweep)
    place = sweep / "renamed"
    place.mkdir(parents=True)
    (place / "plan.json").write_text(json.dumps({"point_id": Path(config.output_dir).name.rpartition("-")[2]}))
    capsys.readouterr()
    launch_points(session, lines, sweep, settings, waits=False)
    assert "are in the sweep already, under other names" in capsys.readouterr().err
