"""The ready-made sweeps: every point valid, the command line first, names, mistakes."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from runs import run

from prl.config import ConfigError, compose
from prl.config.locate import config_groups, sweeps_dir
from prl.config.overrides import swept_keys
from prl.config.point import point_id
from prl.config.schema import RunConfig
from prl.config.sweep import compose_points, expand, sweep_lines

FILES = sorted(sweeps_dir().glob("*.yaml"))
NAMES = [path.stem for path in FILES]


def points_of(*overrides: str, job: str = "rl") -> list[RunConfig]:
    return compose_points(sweep_lines(list(overrides), job), job)


def axes(path: Path) -> dict[str, list[str]]:
    params = OmegaConf.load(path).hydra.sweeper.params
    return {str(key): str(values).split(",") for key, values in params.items()}


def test_the_sweeps_that_are_asked_for_are_there() -> None:
    wanted = {"memory_ladder", "parallelism_memory", "staleness_loss", "colocated_disaggregated", "seeds"}
    assert wanted <= set(NAMES)


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_a_sweep_says_what_it_answers_and_what_it_costs(path: Path) -> None:
    comment = " ".join(itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines()))
    assert "?" in comment
    assert re.search(r"Estimated|Measured", comment)
    count = re.search(r"Costs (\d+) points", comment)
    assert count
    assert int(count[1]) == len(expand(sweep_lines([f"+sweep={path.stem}"], "rl")))
    assert f"| `{path.stem}` |" in (path.parent / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_point_of_a_sweep_is_valid_and_no_two_are_the_same(path: Path) -> None:
    configs = points_of(f"+sweep={path.stem}")
    assert len({point_id(config) for config in configs}) == len(configs)
    assert {config.sweep for config in configs} == {path.stem}
    for key, values in axes(path).items():
        group = "memory_recipe" if key == "memory" else key
        if group in config_groups():
            assert {config.choices[group] for config in configs} == set(values)
    assert "sweep_file" not in configs[0].choices


def test_the_memory_ladder_has_every_recipe() -> None:
    assert sorted(axes(sweeps_dir() / "memory_ladder.yaml")["memory"]) == config_groups()["memory_recipe"]


def test_the_memory_ladder_runs_as_a_benchmark_too() -> None:
    configs = points_of("+sweep=memory_ladder", "bench.doc_len=64", job="bench")
    assert {config.job for config in configs} == {"bench"}
    assert len(configs) == 6


def test_the_command_line_wins() -> None:
    lines = sweep_lines(["+sweep=memory_ladder", "memory=tight", "seed=4,5", "max_steps=7"], "rl")
    assert swept_keys(lines) == ["seed"]
    configs = compose_points(lines, "rl")
    assert [config.seed for config in configs] == [4, 5]
    assert {config.choices["memory_recipe"] for config in configs} == {"tight"}
    assert {config.max_steps for config in configs} == {7}


def test_a_sweep_sets_what_all_points_share() -> None:
    configs = points_of("+sweep=lora_rank", "seed=1")
    assert {config.optim.type for config in configs} == {"adamw"}
    assert {config.memory_recipe.lora.rank for config in configs} == {0, 1, 8, 32}


@pytest.mark.parametrize(
    ("overrides", "name"),
    [(["+sweep=seeds"], "seeds"), (["+sweep=seeds", "sweep=mine"], "mine"), (["sweep=mine"], "mine"), ([], None)],
    ids=str,
)
def test_a_sweep_is_named_after_its_file_or_as_the_command_line_says(overrides: list[str], name: str | None) -> None:
    assert compose(overrides).sweep == name


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["+sweep=seedz"], "Did you mean 'seeds'?"),
        (["+sweep=seeds,group_size"], "Several sweeps at once"),
        (["+sweep=seeds", "+sweep=group_size"], "Several sweeps at once"),
        (["+sweep=seeds", "parallelism.ep=3"], "ep"),
    ],
    ids=str,
)
def test_mistakes_are_explained(overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        points_of(*overrides)
    assert said in caught.value.render()


@pytest.mark.slow
def test_planning_a_sweep_from_the_command_line_shows_every_point(tmp_path: Path) -> None:
    done = run(["-m", "+sweep=colocated_disaggregated", "seed=1,2"], tmp_path, module="prl.plan")
    assert done.code == 0, done.output
    assert done.output.count("point ") == 8
    assert list(tmp_path.iterdir()) == []


def test_points_are_in_the_order_and_words_of_hydras_sweeper() -> None:
    """A launcher finds a point by the overrides that the sweeper hands it."""
    assert expand(sweep_lines(["seed=1,2", "+sweep=memory_ladder", "memory=tight,none"], "rl"))[:2] == [
        ["memory=tight", "seed=1", "+sweep_file=memory_ladder"],
        ["memory=tight", "seed=2", "+sweep_file=memory_ladder"],
    ]
