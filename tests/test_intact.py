"""What is made once in cache_dir: damage is found before anybody begins with it, and a full disk is told as that."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest
from runtime_tree import fill_bytes, mount_small_disk

from prl.config import compose
from prl.config.errors import PassingError, UserError
from prl.config.point import random_checkpoint_dir
from prl.models.checkpoints.sources import random_checkpoint
from prl.runtime import made_once
from prl.runtime.directory import intact
from prl.runtime.directory.claims import Claim


@pytest.fixture
def small_disk(tmp_path: Path):
    yield from mount_small_disk(tmp_path / "disk")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "cache/warm_start/key"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (path / "config.json").write_text("{}")
    intact.seal(path)
    return path


def drop(path: Path) -> str:
    notes: list[str] = []
    intact.drop_damaged(path, "warm start", notes.append)
    return "\n".join(notes)


def test_what_is_as_it_was_made_stays(made: Path) -> None:
    (made / "beside").write_text("somebody's own")
    assert drop(made) == ""
    assert drop(made.with_name("absent")) == ""
    (made / "manifest.json").unlink()
    (made / "config.json").unlink()
    assert drop(made) == ""
    assert made.is_dir(), "of an earlier version, which has no list"


@pytest.mark.parametrize("damage", ["zeroed", "cut", "empty", "gone", "a directory", "no list"])
def test_what_is_not_is_named_and_removed(made: Path, damage: str) -> None:
    file = made / "model.safetensors"
    content = file.read_bytes()
    {
        "zeroed": lambda: file.write_bytes(content[:512] + bytes(8) + content[520:]),
        "cut": lambda: file.write_bytes(content[:-1]),
        "empty": lambda: file.write_bytes(b""),
        "gone": file.unlink,
        "a directory": lambda: (file.unlink(), file.mkdir()),
        "no list": lambda: (made / "manifest.json").write_text("[]"),
    }[damage]()
    said = drop(made)
    assert "warm start: damaged in the cache, made again" in said
    assert ("manifest.json" if damage == "no list" else "model.safetensors") in said
    assert list(made.parent.iterdir()) == []


def test_of_much_only_the_sizes_count(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intact, "CHECKED_BYTES", 1000)
    intact.seal(made)
    file = made / "model.safetensors"
    file.write_bytes(bytes(10240))
    assert drop(made) == ""
    file.write_bytes(bytes(10239))
    assert "10239 bytes, not 10240" in drop(made)


def test_what_cannot_be_read_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, parts: tuple[str, ...]) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path / "model.safetensors"))

    monkeypatch.setattr(intact, "find_damage", refused)
    with pytest.raises(UserError, match="cannot be read"):
        drop(made)
    assert made.is_dir()


def test_random_weights_are_listed_and_made_again(tmp_path: Path) -> None:
    config = compose([f"cache_dir={tmp_path}"])
    path = random_checkpoint(config.model, tmp_path)
    weights = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(weights[:-4] + bytes(4))
    assert "model.safetensors has another checksum" in drop(path)
    assert random_checkpoint(config.model, tmp_path) == path == random_checkpoint_dir(config.model, str(tmp_path))
    assert (path / "model.safetensors").read_bytes() == weights


def test_a_full_disk_is_told_where_it_is(small_disk: Path, tmp_path: Path, made: Path) -> None:
    """Another one than the run's: what was made is moved there by copying."""
    (made / "model.safetensors").write_bytes(os.urandom(1 << 16))
    cached = small_disk / "cache/warm_start/key"
    cached.parent.mkdir(parents=True)
    claim = Claim(cached)
    assert claim.take()
    fill_bytes(small_disk)
    with pytest.raises(PassingError, match=r"The disk is full: .*/warm_start/key could not be written") as told:
        made_once.publish(made, cached, claim)
    assert told.value.where == f"cache_dir={small_disk}/cache"
    assert not any(path.is_dir() for path in cached.parent.iterdir()), "the half of it is removed"
    with pytest.raises(PassingError, match=r"The disk is full: .*disk/cache/models/"):
        random_checkpoint(compose([]).model, small_disk / "cache")
    shutil.rmtree(small_disk / "cache")
