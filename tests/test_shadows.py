"""A file of the user's own that hides a package is named before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from prl.config import compose
from prl.config.errors import UserError
from prl.planning import make_plan
from prl.runtime.preflight import check_machine
from prl.runtime.shadows import shadowed


def write(place: Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("raise RuntimeError('mine')\n")
    return place


@pytest.fixture(autouse=True)
def no_other_path(monkeypatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.mark.parametrize("name", ["torch.py", "torch/__init__.py"])
def test_what_hides_a_package_is_named(tmp_path, monkeypatch, name) -> None:
    mine = write(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    (found,) = shadowed()
    assert found.where == str(mine)
    assert torch.__file__ in (found.why or "")


def test_packages_may_come_by_pythonpath(tmp_path, monkeypatch) -> None:
    """An overlay of newer packages; and what it has is found before a file in the working directory."""
    write(tmp_path / "overlay" / "torch" / "__init__.py")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "overlay"))
    assert not list(shadowed())
    write(tmp_path / "torch.py")
    monkeypatch.chdir(tmp_path)
    assert not list(shadowed())
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert not list(shadowed())


def test_a_run_is_refused(tmp_path, monkeypatch) -> None:
    write(tmp_path / "torch.py")
    monkeypatch.chdir(tmp_path)
    config = compose([f"cache_dir={tmp_path / 'cache'}"])
    with pytest.raises(UserError, match="torch is hidden by a file of the same name"):
        check_machine(config, make_plan(config), starts_all=True)


def test_what_hides_nothing_is_let_be(tmp_path, monkeypatch) -> None:
    """A folder without code is none of Python's packages; and who starts where packages lie finds the same ones."""
    write(tmp_path / "torch" / "notes.txt")
    write(tmp_path / "my_rewards.py")
    monkeypatch.chdir(tmp_path)
    assert not list(shadowed())
    monkeypatch.chdir(Path(yaml.__file__).parent.parent)
    assert not list(shadowed())
