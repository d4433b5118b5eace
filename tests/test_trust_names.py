"""A name stays where it is put: nothing is written outside of outputs/ and the cache by what something is called."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from runs import SMALL, run

from prl.config import ConfigError, compose
from prl.config.place_names import as_file_name, is_file_name
from prl.config.rules import violations
from prl.models.checkpoints.sources import random_checkpoint

NAMES = ("../../evil", "a/b", "/tmp/evil", "..", ".", "-rf", ".hidden", "a" * 200, "x\\\\y")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("key", ["name", "sweep"])
def test_a_name_that_leads_elsewhere_is_refused_and_its_remedy_works(key: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([f"{key}='{name}'"])
    (error,) = caught.value.violations
    assert error.fix is not None
    assert error.fix.startswith(f"{key}=")
    assert getattr(compose([error.fix]), key) == error.fix.partition("=")[2]


@pytest.mark.parametrize("name", ["run", "my run", "Größe", "a.b-c_d", "lr=0.1"])
def test_other_names_are_as_they_are(name: str) -> None:
    assert is_file_name(name)


def test_an_environment_is_not_called_after_a_path() -> None:
    config = compose([])
    (source,) = config.env.mix.values()
    environments = config.env.model_copy(update={"mix": {"../../evil": source}})
    (error,) = violations(config.model_copy(update={"env": environments}))
    assert "cannot be the name of an environment" in error.what


@pytest.mark.parametrize("name", NAMES)
def test_a_models_name_leads_nowhere(name: str, tmp_path: Path) -> None:
    assert is_file_name(as_file_name(name))
    config = compose(["model.card.num_hidden_layers=1"]).model.model_copy(update={"name": name})
    assert random_checkpoint(config, tmp_path / "cache").parent == tmp_path / "cache" / "models"


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [["name=../../evil"], ["-m", "sweep=../../../evil", "seed=1,2"]], ids=["name", "sweep"]
)
def test_nothing_appears_outside(asked: list[str], tmp_path: Path) -> None:
    where = tmp_path / "a" / "b" / "c"
    where.mkdir(parents=True)
    done = run([*asked, *SMALL, "max_steps=1", f"cache_dir={tmp_path}/cache"], where)
    assert done.code == 2, done.output
    assert "cannot be the name of a directory" in done.output
    assert [path for path, _, _ in os.walk(tmp_path) if "evil" in path] == []
