"""What a warm start is found by in the cache: all that its result depends on, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest

from prl.config import compose
from prl.config.point import random_checkpoint_dir, warm_start_key
from prl.config.schema import Group, RunConfig
from prl.planning import make_plan, warm_start_plan
from prl.runtime.warm_cache import warm_start_dir

OVERRIDES = ("env=[reverse_text,countdown]", "slurm.time=5", "slurm.sbatch=[--exclusive]")  # something in each place
SPEED = ("parallelism", "memory_recipe", "deployment", "debug", "logging", "cache_dir")  # of the stage, and no more
UNREAD = {"model.name", "model.attn", "model.card.cp_styles", "model.card.ac_targets"}


@cache
def base() -> RunConfig:
    return compose(list(OVERRIDES))


def leaves(group: Group, prefix: str = "") -> Iterator[str]:
    for name in type(group).model_fields:
        value = getattr(group, name)
        if isinstance(value, Group):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def other(value: Any) -> Any:
    """Something else of the same kind; nobody validates it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "more": 1}
    if isinstance(value, tuple):
        return value[1:] or ((value[0], value[0]) if value else (1,))
    return f"{value}x"


def changed(group: Any, parts: list[str]) -> Any:
    value = getattr(group, parts[0])
    return group.model_copy(update={parts[0]: changed(value, parts[1:]) if parts[1:] else other(value)})


def with_other(key: str) -> RunConfig:
    return changed(base(), key.split("."))


KEYS = list(leaves(base()))
MINE = [key for key in KEYS if key.startswith(("model.", "warm_start.")) and key not in UNREAD]


@pytest.mark.parametrize("key", MINE)
def test_what_the_result_depends_on_makes_another_warm_start(key: str) -> None:
    assert warm_start_key(with_other(key)) != warm_start_key(base())


def test_nothing_else_makes_another_warm_start() -> None:
    others = [key for key in KEYS if key not in MINE]
    assert len(others) > 150
    assert {"seed", "algo.batch_size", "env.mix", "optim.lr", "max_steps", "output_dir", "name"} <= set(others)
    assert [key for key in others if warm_start_key(with_other(key)) != warm_start_key(base())] == []


@pytest.mark.parametrize("group", sorted({key.partition(".")[0] for key in KEYS} - {"model", "warm_start", *SPEED}))
def test_the_stage_is_told_of_nothing_else(group: str) -> None:
    """So that no key outside of the cache's may change what is trained."""
    plan = make_plan(base())
    told = warm_start_plan(plan)
    assert told is not None
    for key in (key for key in KEYS if key.partition(".")[0] == group):
        stage = warm_start_plan(plan.model_copy(update={"config": with_other(key)}))
        assert stage == told, key


def test_validation_counts_only_where_something_stops_upon_it() -> None:
    steady = "warm_start.target_val_loss=0"
    for key in ("val_interval", "val_rows"):
        assert warm_start_key(compose([steady, f"warm_start.{key}=3"])) == warm_start_key(compose([steady]))


def test_a_relative_path_is_another_file_elsewhere_and_a_file_that_changes_another_input(tmp_path, monkeypatch) -> None:
    config = compose(["warm_start.data.source=chats.jsonl", "warm_start.data.args={}"])
    found = []
    for text in ("one", "other"):
        (tmp_path / text).mkdir()
        monkeypatch.chdir(tmp_path / text)
        Path("chats.jsonl").write_text(text)
        found.append(warm_start_dir(config))
    assert warm_start_dir(config) == found[-1]
    Path("chats.jsonl").write_text("third")
    assert len({*found, warm_start_dir(config)}) == 3


def test_a_checkpoint_written_anew_is_another_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = base().model_copy(update={"model": base().model.model_copy(update={"path": str(tmp_path)})})
    before = warm_start_dir(config)
    os.utime(tmp_path / "config.json", ns=(1, 1))
    assert warm_start_dir(config) != before


def test_an_environment_of_the_users_own_that_was_edited_demonstrates_something_else(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = compose(["warm_start.data.source=env:my_shouts:Shout", "warm_start.data.args={}"])
    found = set()
    for text in ("class Shout: loud = 1\n", "class Shout: loud = 2\n"):
        Path("my_shouts.py").write_text(text)
        found.add(warm_start_dir(config))
    assert len(found) == 2


def test_runs_of_all_seeds_begin_with_the_same_weights() -> None:
    assert len({random_checkpoint_dir(compose([f"seed={seed}"]).model, "c") for seed in range(3)}) == 1
    models = [reduce(changed_model, keys, base().model) for keys in ([], ["init_seed"], ["tokenizer"])]
    assert len({random_checkpoint_dir(model, "c") for model in models}) == 3


def changed_model(model: Any, key: str) -> Any:
    return changed(model, [key])
