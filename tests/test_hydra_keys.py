"""Keys of Hydra's own node: each works, or is refused with the key that does it."""

import sys

import pytest
from hydra.conf import HydraConf
from omegaconf import DictConfig, OmegaConf

from prl.config.composing import compose_yaml, know_command
from prl.config.errors import ConfigError
from prl.config.hydra_keys import REFUSED, WORKING, refused_hydra_key
from prl.config.overrides import contradictions
from prl.config.search_path import use_directories
from prl.entry import run_app


def leaves(node: DictConfig, prefix: str = "") -> list[str]:
    found = []
    for key in map(str, node):
        below = node._get_node(key)
        is_node = isinstance(below, DictConfig) and not below._is_missing() and len(below)
        found += leaves(below, f"{prefix}{key}.") if is_node else [f"{prefix}{key}"]
    return found


@pytest.mark.parametrize("key", leaves(OmegaConf.structured(HydraConf)))
def test_every_key_of_hydra_works_or_is_refused(key):
    works = any(f"{key}.".startswith(f"{name}.") for name in WORKING)
    assert works == (refused_hydra_key(f"hydra.{key}") is None)
    assert works == (not contradictions([f"hydra.{key}=x"]) or key in ("sweeper", "launcher", "defaults"))


def test_what_is_refused_is_a_key_of_hydra():
    known = leaves(OmegaConf.structured(HydraConf))
    for name in REFUSED:
        assert any(f"{key}.".startswith(f"{name}.") for key in known), name


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("hydra.run.dir=x", "output_dir=DIRECTORY"),
        ("hydra.sweep.subdir=x", "hydra.sweep.dir=DIRECTORY"),
        ("hydra.output_subdir=.hydra", "output_dir=DIRECTORY"),
        ("hydra.mode=MULTIRUN", "-m"),
        ("hydra.job.name=x", "name=NAME"),
        ("hydra.job.chdir=true", "cd DIRECTORY"),
        ("hydra.job.env_copy=[A]", "set it before the command"),
        ("+hydra.job.env_set.A=1", "set it before the command"),
        ("hydra/job_logging=default", "leave it out"),
        ("hydra/hydra_logging=default", "leave it out"),
        ("hydra.job_logging.version=1", "leave it out"),
        ("hydra.runtime.cwd=x", "leave it out"),
        ("+hydra.callbacks.x={_target_: nowhere}", "leave it out"),
        ("+hydra.foo=1", "leave it out"),
        ("+hydra.serchpath=[x]", "hydra.searchpath=..."),
    ],
)
def test_what_does_nothing_is_refused_with_the_key_that_does_it(line, fix):
    with pytest.raises(ConfigError) as told:
        compose_yaml([line])
    (violation,) = told.value.violations
    assert violation.what == f"{line} is not valid."
    assert violation.fix.startswith(fix)


@pytest.mark.parametrize(
    "line",
    [
        "hydra/job_logging=none",
        "hydra/launcher=local",
        "hydra.launcher.dry_run=true",
        "hydra.verbose=true",
        "hydra.searchpath=[]",
        "hydra.sweep.dir=x",
        "hydra.sweeper.max_batch_size=3",
    ],
)
def test_what_works_is_let_be(line):
    compose_yaml([line])


@pytest.mark.parametrize("key", ["hydra.sweep.dir=x", "hydra.sweeper.params={seed: 3}"])
def test_keys_of_a_sweep_are_refused_in_a_run(monkeypatch, capsys, tmp_path, key):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prl", key])
    with pytest.raises(SystemExit) as left:
        run_app(lambda config: 0, "rl")
    know_command(False, [])
    assert left.value.code == 2
    assert f"{key.partition('=')[0]} is for sweeps." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_file_of_ones_own_is_refused_with_its_line(tmp_path):
    (tmp_path / "overlay").mkdir()
    text = "# @package _global_\nseed: 3\nhydra:\n  run:\n    dir: x\n"
    (tmp_path / "overlay/mine.yaml").write_text(text)
    use_directories(str(tmp_path), [])
    try:
        with pytest.raises(ConfigError) as told:
            compose_yaml(["+overlay=mine"])
    finally:
        use_directories(None, [])
    (violation,) = told.value.violations
    assert violation.what == "mine.yaml has the key hydra.run, which does nothing here."
    assert violation.where == f"{tmp_path}/overlay/mine.yaml, line 4"
    assert violation.fix == "leave it out there; instead: output_dir=DIRECTORY"
