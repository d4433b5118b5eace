"""YAML of the user's own beside conf/: the same for a run, a sweep, a plan, a completion and a submission."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from runs import TESTS, environment
from slurm_cluster import SMALL_RL, copy_checkout, points_of, states, steps_of, sweep_of, wait_for_queue

from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.config.overrides import parse
from prl.config.search_path import use_directories
from prl.config.sweep import compose_points

OVERLAY = """# @package _global_
defaults:
  - override /algo: sync
  - override /memory_recipe: tight
optim:
  lr: 0.005
env:
  mix:
    reverse_text:
      args:
        max_chars: 7
"""
SWEEP = """hydra:
  sweeper:
    params:
      seed: 1,2
"""


@pytest.fixture
def configs(tmp_path: Path) -> Path:
    """An overlay, a group within a group, a model and a sweep of the user's own."""
    root = tmp_path / "configs"
    files = {
        "overlay/mine.yaml": OVERLAY,
        "lab/team/slow.yaml": "# @package _global_\noptim:\n  lr: 0.0001\n",
        "model/ours.yaml": (TESTS.parent / "conf/model/tiny_qwen3.yaml").read_text(),
        "sweeps/two.yaml": SWEEP,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def used(configs: Path):
    use_directories(str(configs), [])
    yield configs
    use_directories(None, [])


def run(directory: Path, *words: str, module: str = "rl") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"prl.{module}", *words]
    return subprocess.run(command, cwd=directory, env=environment(), capture_output=True, text=True, timeout=240)


def test_an_overlay_composes_with_overrides_groups_and_axes(used):
    config = compose(["+overlay=mine", "model=ours", "seed=3"])
    assert (config.optim.lr, config.algo.max_off_policy_steps, config.seed) == (0.005, 0, 3)
    assert (config.choices["overlay"], config.choices["model"]) == ("mine", "ours")
    assert config.choices["memory_recipe"] == "tight"
    points = compose_points(["+overlay=mine", "optim.lr=0.1,0.2", "model=ours,tiny_qwen3"], "rl")
    assert [(point.optim.lr, point.choices["model"]) for point in points] == [
        (0.1, "ours"),
        (0.1, "tiny_qwen3"),
        (0.2, "ours"),
        (0.2, "tiny_qwen3"),
    ]
    assert all(point.algo.max_off_policy_steps == 0 for point in points)
    assert compose(["+lab/team=slow"]).optim.lr == 0.0001
    assert [point.optim.lr for point in compose_points(["+lab/team=slow", "seed=1,2"], "sft")] == [0.0001] * 2


@pytest.mark.parametrize(
    ("override", "fix"),
    [
        ("+overlay=mien", "+overlay=mine"),
        ("overlay=mine", "+overlay=mine"),
        ("+overlai=mine", "+overlay=mine"),
        ("model=our", "model=ours"),
        ("+overlay=5", "+overlay=mine"),
    ],
)
def test_a_wrong_choice_names_the_right_one(used, override, fix):
    with pytest.raises(ConfigError) as refused:
        compose([override])
    (violation,) = refused.value.violations
    assert violation.fix == fix


def test_a_directory_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match=f"There is no directory {tmp_path}/nowhere"):
        use_directories(None, parse([f"hydra.searchpath=[file://{tmp_path}/nowhere]"]))


@pytest.mark.slow
def test_commands_see_the_same_files(configs, tmp_path):
    planned = run(tmp_path, "--config-dir", "configs", "+overlay=mine", "model=ours", module="plan")
    assert planned.returncode == 0, planned.stderr
    assert "model tiny_qwen3," in planned.stdout
    dry = ["-m", "hydra.launcher.dry_run=true", "hydra/launcher=slurm", "sweep=s"]
    path = f"hydra.searchpath=[file://{configs}]"
    swept = run(tmp_path, *dry, path, "+overlay=mine", "optim.lr=0.1,0.2")
    assert swept.returncode == 0, swept.stderr
    rates = {json.loads(plan.read_text())["config"]["optim"]["lr"] for plan in tmp_path.glob("outputs/*/s/*/plan.json")}
    assert rates == {0.1, 0.2}
    (copy,) = tmp_path.glob("outputs/sweeps/s/code/*/configs/0/overlay/mine.yaml")
    assert copy.read_text() == OVERLAY
    ready = run(tmp_path, "--config-dir", "configs", *dry[:-1], "+sweep=two")
    assert ready.returncode == 0, ready.stderr
    assert "UserWarning" not in ready.stderr
    assert len(list(tmp_path.glob("outputs/sweeps/two/*/plan.json"))) == 2
    assert not list(tmp_path.rglob("multirun.yaml")), "Hydra's record of a sweep, which nothing reads"


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("slurm")
def test_a_sweep_of_an_overlay_from_a_checkout_runs_on_slurm(configs, tmp_path):
    source = copy_checkout(tmp_path / "checkout")
    lines = ["--config-dir", str(configs), "+overlay=mine", "hydra/launcher=slurm", "sweep=s", *SMALL_RL]
    command = [sys.executable, "-m", "prl.rl", "-m", *lines, "algo.batch_size=16,32", "max_steps=2"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    (configs / "overlay/mine.yaml").write_text("broken: [")
    wait_for_queue()
    assert set(states(source).values()) == {"COMPLETED"}
    assert [steps_of(point) for point in points_of(source)] == [[1, 2]] * 2
    assert len(sweep_of(source)["points"]) == 2
