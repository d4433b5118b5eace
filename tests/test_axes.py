"""Axes of a sweep as they are typed: what they stand for, and a command that has them without being a sweep."""

import sys

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser

from launch.hydra_plugin import register_plugins
from prl.config.composing import _hydra, know_command
from prl.config.errors import UserError
from prl.config.hydra_setup import in_hydras_terms
from prl.config.locate import config_groups
from prl.config.overrides import contradictions
from prl.config.search_path import use_directories
from prl.config.sweep import BasicSweeper, compose_points, expand, sweep_lines
from prl.entry import run_app


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own/overlay").mkdir(parents=True)
    (tmp_path / "own/env").mkdir()
    (tmp_path / "own/env/beyond.yaml").write_text("defaults: [countdown]\n")
    for name in ("zebra", "ant"):
        (tmp_path / f"own/overlay/{name}.yaml").write_text("# @package _global_\nseed: 5\n")
    use_directories(str(tmp_path / "own"), [])
    yield
    use_directories(None, [])


def said(monkeypatch, capsys, *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["prl", *words])
    with pytest.raises(SystemExit) as left:
        run_app(lambda config: 0, "rl")
    know_command(False, [])
    shown = capsys.readouterr().err
    assert left.value.code == 2, shown
    return shown


@pytest.mark.parametrize(
    "axes",
    [
        ["memory=glob(*)", "seed=1,2"],
        ["seed=1,2", "env=glob(*,exclude=hf*)"],
        ["optim=glob([m*,a*])", "memory=glob(*t)"],
        ["+overlay=glob(*)", "memory_recipe=glob(*)"],
        ["+experiment=glob(math*)"],
    ],
    ids=" ".join,
)
@pytest.mark.usefixtures("own")
def test_a_glob_stands_for_what_hydras_own_sweeper_takes_it_for(axes):
    with _hydra():
        parser = OverridesParser.create(config_loader=GlobalHydra.instance().config_loader())
        hydras = BasicSweeper.split_arguments(parser.parse_overrides(in_hydras_terms(axes)), max_batch_size=None)[0]
    assert len(hydras) > 1
    assert expand(axes) == hydras


def test_each_choice_of_a_glob_is_a_point():
    register_plugins()
    points = compose_points(sweep_lines(["memory=glob(*)"], "rl"), "rl")
    assert [config.choices["memory_recipe"] for config in points] == config_groups()["memory_recipe"]


@pytest.mark.parametrize(
    ("axis", "why"),
    [
        ("memory=glob(zz*)", "conf/memory_recipe has: balanced,"),
        ("seed=glob(*)", "seed is none"),
        ("seed=range(5,1)", "to below its stop"),
    ],
)
def test_an_axis_without_values_is_told(axis, why):
    (told,) = contradictions([axis])
    assert told.what.startswith(axis)
    assert why in told.why


def test_an_axis_without_values_in_the_file_of_a_sweep_is_told(tmp_path):
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps/nothing.yaml").write_text("hydra: {sweeper: {params: {seed: 'range(3,3)'}}}\n")
    use_directories(str(tmp_path), [])
    register_plugins()
    try:
        with pytest.raises(UserError, match=r"seed=range\(3,3\) has no values"):
            sweep_lines(["+sweep=nothing"], "rl")
    finally:
        use_directories(None, [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optim.lr=1e-4,2e-4"], ["python -m prl.rl -m optim.lr=1e-4,2e-4\n"]),
        (["memory=none,tight", "max_steps=3"], ["python -m prl.rl -m memory=none,tight max_steps=3\n"]),
        (["seed=choice(1,2)"], ["python -m prl.rl -m 'seed=choice(1,2)'\n"]),
        (["seed=range(1,3)"], ["python -m prl.rl -m 'seed=range(1,3)'\n"]),
        (["memory=glob(*)"], ["python -m prl.rl -m 'memory=glob(*)'\n"]),
        (["optim.lr=interval(0,1)"], ["python -m prl.rl -m 'optim.lr=interval(0,1)'\n"]),
        (["seed=1,2", "--config-dir", "/tmp"], ["python -m prl.rl -m seed=1,2 --config-dir /tmp\n"]),
        (["train.lr=1e-4,2e-4"], ["Did you mean 'optim.lr'", "python -m prl.rl -m train.lr=1e-4,2e-4\n"]),
        (["env=countdown,reverse_text"], ["-m env=", "or 'env=[countdown,reverse_text]' to mix them"]),
        (["optim.betas=0.9,0.95"], ["-m optim.betas=", "or 'optim.betas=[0.9,0.95]' for a list"]),
        (["name=a,b"], ["-m name=a,b", """or 'name="a,b"' for a text"""]),
        (["--cfg", "job", "seed=1,2"], ["--cfg shows one configuration", "one value for seed"]),
    ],
    ids=str,
)
def test_a_sweep_without_its_option_is_told_with_the_command(monkeypatch, capsys, words, told):
    shown = said(monkeypatch, capsys, *words)
    for part in told:
        assert part in shown


@pytest.mark.parametrize(
    "word", ["optim.betas=[0.9,0.95]", "name='a,b'", 'name="a,b"', "env=[countdown,reverse_text]", r"name=a\,b"]
)
def test_commas_within_one_value_are_no_sweep(monkeypatch, capsys, word):
    monkeypatch.setattr(sys, "argv", ["prl", word])
    with pytest.raises(SystemExit) as left:
        run_app(lambda config: 0, "rl", starts_nothing=True)
    know_command(False, [])
    assert left.value.code == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--experimental-rerun", "x"], "--experimental-rerun is not supported."),
        (["--cfg", "job", "-m", "seed=1,2"], "--cfg and -m cannot be given together."),
        (["--run", "--info"], "--run and --info cannot be given together."),
        (["--resolve"], "--resolve is for --cfg."),
        (["foo"], "Cannot read the override 'foo'."),
        (["=5"], "Cannot read the override '=5'."),
    ],
    ids=str,
)
def test_options_that_are_not_for_prl_are_told(monkeypatch, capsys, words, told):
    assert told in said(monkeypatch, capsys, *words)
