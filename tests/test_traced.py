"""A wrong key or value is traced to the file of the user's own that says it, and all that is wrong is told at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from prl.config.composing import know_command
from prl.config.search_path import use_directories
from prl.entry import run_app
from prl.plan import show_table

HEADER = "# @package _global_\n"


@pytest.fixture
def own(tmp_path: Path):
    """Writes a file of a directory that is searched."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    yield write
    use_directories(None, [])


def plan(monkeypatch, capsys, *words: str) -> str:
    """What `python -m prl.plan` says on stderr, without what separates its lines; "" if it takes them."""
    monkeypatch.setattr(sys, "argv", ["prl plan", *words])
    with pytest.raises(SystemExit) as left:
        run_app(show_table, "rl", starts_nothing=True)
    know_command(False, [])  # as every command but those that only look
    said = capsys.readouterr().err
    assert left.value.code == (2 if said else 0)
    return said


@pytest.mark.parametrize(
    ("name", "text", "words", "key", "line"),
    [
        ("overlay/mine.yaml", f"{HEADER}seed: 1\noptim:\n  lr: fast\n", ["+overlay=mine"], "optim.lr", 4),
        ("overlay/mine.yaml", f"{HEADER}optim: 5\n", ["+overlay=mine"], "optim", 2),
        ("mine.yaml", "defaults: [rl, _self_]\noptim:\n  lr: fast\n", ["-cn", "mine"], "optim.lr", 3),
        ("optim/mine.yaml", "defaults: [adamw, _self_]\nlr: fast\n", ["optim=mine"], "optim.lr", 2),
        ("local/default.yaml", f"{HEADER}seed: x\n", [], "seed", 2),
        ("overlay/mine.yaml", f"{HEADER}max_steps: -3\n", ["+overlay=mine"], "max_steps", 2),
        ("overlay/mine.yaml", f"{HEADER}parallelism:\n  ep: 3\n", ["+overlay=mine"], "parallelism.ep", 3),  # a rule's
        ("overlay/mine.yaml", f"{HEADER}seed: x\n", ["-m", "+overlay=mine", "max_steps=1,2"], "seed", 2),
        ("sweeps/mine.yaml", f"{HEADER}hydra:\n  sweeper:\n    params:\n      seed: 1,x\n", ["-m", "+sweep=mine"],
         "seed", 5),
    ],
)  # fmt: skip
@pytest.mark.parametrize("through", [False, True])
def test_a_bad_value_names_the_file_and_the_line(
    own, tmp_path, monkeypatch, capsys, name, text, words, key, line, through
):
    path = own(name, text)
    if through and name != "overlay/mine.yaml":
        pytest.skip("only overlays choose overlays")
    if through:  # by a file that chooses it
        own("overlay/outer.yaml", f"{HEADER}defaults: [mine, _self_]\n")
        words = [word.replace("=mine", "=outer") for word in words]
    said = plan(monkeypatch, capsys, "--config-dir", str(tmp_path), *words)
    where = [one for one in said.splitlines() if one.startswith("  where:") and key in one]
    assert any(f"{path}, line {line}" in one for one in where), said


@pytest.mark.parametrize("words", [["seed=x", "+overlay=mine"], ["-m", "seed=1,x", "+overlay=mine"]])
def test_what_the_command_line_says_is_not_blamed_on_a_file(own, tmp_path, monkeypatch, capsys, words):
    own("overlay/mine.yaml", f"{HEADER}seed: 5\n")
    said = plan(monkeypatch, capsys, "--config-dir", str(tmp_path), *words)
    assert "seed=x is not valid" in said
    assert "mine.yaml" not in said


def test_a_wrong_key_of_a_job_of_ones_own_names_the_file(own, tmp_path, monkeypatch, capsys):
    path = own("mine.yaml", "defaults: [rl, _self_]\nmax_stepz: 5\noptim:\n  lrr: 1.0\n")
    said = plan(monkeypatch, capsys, "--config-dir", str(tmp_path), "-cn", "mine")
    assert "mine.yaml has the key 'max_stepz', which there is not. Did you mean 'max_steps'?" in said
    assert f"where: {path}, line 2" in said
    assert f"where: {path}, line 4" in said
    assert "2 problems" in said
    own("mine.yaml", "defaults: [rl, _self_]\nmax_steps: 5\n")
    assert plan(monkeypatch, capsys, "--config-dir", str(tmp_path), "-cn", "mine") == ""


LEFT = f"{HEADER}max_steps: ???\noptim:\n  lr: ???\n"


@pytest.mark.parametrize("multirun", [[], ["-m", "seed=1,2"]])
def test_what_a_file_leaves_to_its_user_is_asked_for(own, tmp_path, monkeypatch, capsys, multirun):
    path = own("overlay/mine.yaml", LEFT)
    said = plan(monkeypatch, capsys, "--config-dir", str(tmp_path), "+overlay=mine", *multirun)
    assert "max_steps has no value." in said
    assert f"where: max_steps=???, said by {path}, line 2" in said
    assert f"where: optim.lr=???, said by {path}, line 4" in said
    words = ["+overlay=mine", *multirun, "max_steps=3"]
    assert "max_steps" not in plan(monkeypatch, capsys, "--config-dir", str(tmp_path), *words)
    assert plan(monkeypatch, capsys, "--config-dir", str(tmp_path), *words, "optim.lr=1e-3") == ""


def test_a_choice_of_its_group_gives_no_key(own, tmp_path, monkeypatch, capsys):
    own("overlay/mine.yaml", LEFT)
    words = ["--config-dir", str(tmp_path), "+overlay=mine", "max_steps=3"]
    assert "optim.lr has no value." in plan(monkeypatch, capsys, *words, "optim=adamw")
    assert plan(monkeypatch, capsys, *words, "optim=adamw", "optim={lr: 0.1}") == ""


def test_another_file_may_give_it(own, tmp_path, monkeypatch, capsys):
    own("overlay/mine.yaml", LEFT)
    own("overlay/more.yaml", f"{HEADER}max_steps: 4\noptim: {{lr: 0.1}}\n")
    assert plan(monkeypatch, capsys, "--config-dir", str(tmp_path), "+overlay=[mine,more]") == ""


def test_a_swept_key_is_given(own, tmp_path, monkeypatch, capsys):
    own("overlay/mine.yaml", f"{HEADER}max_steps: ???\n")
    words = ["+overlay=mine", "-m", "max_steps=2,3"]
    assert plan(monkeypatch, capsys, "--config-dir", str(tmp_path), *words) == ""


# --- everything at once -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["seed=x", "max_stepz=3", "optim.lr=a"], ["max_stepz", "seed", "optim.lr"]),
        (["algo=nope", "seed=x", "memory=nope"], ["algo=nope", "memory=nope", "seed"]),
        (["optim.lr={", "seed=[", "max_steps=x"], ["optim.lr={", "seed=[", "max_steps"]),
        (["seed=x", "hydra.launcher.nodes=2"], ["hydra.launcher.nodes", "seed"]),
        (["seed=x", "hydra.launcher.mode=foo"], ["seed", "hydra.launcher.mode"]),
        (["parallelism.ep=3", "hydra.launcher.mode=foo"], ["parallelism.ep", "hydra.launcher.mode"]),
        (["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.nodes=two", "hydra.launcher.timeout_min=5m",
          "seed=1,x"], ["hydra.launcher.nodes", "hydra.launcher.timeout_min", "seed"]),
        (["-m", "hydra/launcher=slurm", "hydra.launcher.nodes=2", "hydra.launcher.slurm.time=never", "max_stepz=1,2"],
         ["hydra.launcher.nodes", "hydra.launcher.slurm.time", "max_stepz"]),
    ],
)  # fmt: skip
def test_all_that_is_wrong_with_a_command_line_is_told_at_once(monkeypatch, capsys, words, wrong):
    said = plan(monkeypatch, capsys, *words)
    wheres = [one.removeprefix("  where: ") for one in said.splitlines() if one.startswith("  where:")]
    assert len(wheres) == len(wrong), said
    for key in wrong:
        assert any(where.startswith(key) for where in wheres), said


def test_keys_of_a_launcher_are_read_beside_a_line_that_nobody_can_read(tmp_path):
    """In a process of its own: before anything was composed, Hydra knows the launcher of the original package alone."""
    words = ["-m", "hydra/launcher=submitit_slurm", "hydra.launcher.mem_gb=2", "hydra.launcher.dry_run=true", "seed=["]
    command = [sys.executable, "-m", "prl.rl", *words]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False).stderr
    assert [one for one in said.splitlines() if one.startswith("  where:")] == ["  where: seed=["]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["hydra/launcher=slurm", "hydra.launcher.slurm.time=never"], "hydra.launcher.slurm.time=never is not valid"),
        (["hydra/launcher=slurm", "hydra.launcher.parallel_points=2"], "says nothing of jobs of SLURM"),
        (["hydra/launcher=slurm", "hydra.launcher.slurm.sbatch=['--nodes=2']"], "'--nodes=2', which cannot be"),
        (["hydra/launcher=submitit_slurm", "hydra.launcher.nodes=2"], "hydra.launcher.nodes=2 contradicts"),
        (["hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2"], "tasks_per_node=2 cannot be"),
        (["hydra/launcher=basic"], "cannot start what prl starts"),
    ],
)
def test_plan_refuses_the_launcher_of_a_sweep_as_its_submission_does(monkeypatch, capsys, words, told):
    assert told in plan(monkeypatch, capsys, "-m", *words, "seed=1,2")
