"""Checkpoints are complete or absent, damage is found, a full disk costs only the newest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tree import fill_bytes, mount_small_disk

from prl.config.errors import UserError
from prl.runtime.checkpoints import commit, discard_after, find_damage, latest_valid, staging_dir, step_dir, steps


def write(run_dir: Path, step: int, content: bytes = b"weights", keep: int = 9) -> Path:
    for part in ("trainer", "orchestrator"):
        (staging_dir(run_dir, step) / part).mkdir()
        (staging_dir(run_dir, step) / part / "state").write_bytes(content)
    return commit(run_dir, step, keep)


def test_commit_makes_it_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = write(tmp_path, 10)
    assert latest_valid(tmp_path) == (10, path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_2"]


def test_none_is_none(tmp_path: Path) -> None:
    assert latest_valid(tmp_path) is None


def test_what_is_not_committed_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (staging_dir(tmp_path, 4) / "state").write_text("half")
    found = latest_valid(tmp_path)
    assert found is not None
    assert found[0] == 2
    discard_after(tmp_path, 2)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


def test_old_ones_are_pruned(tmp_path: Path) -> None:
    for step in (1, 2, 3, 11):
        write(tmp_path, step, keep=2)
    assert steps(tmp_path) == [3, 11]


def flip_a_bit(file: Path) -> None:
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def cut_short(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip_a_bit, cut_short, Path.unlink])
def test_a_damaged_file_is_named_and_the_one_before_is_taken(tmp_path: Path, damage: object) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    damage(newer / "trainer" / "state")  # type: ignore[operator]
    told: list[str] = []
    assert latest_valid(tmp_path, told.append) == (1, older)
    assert len(told) == 1
    assert str(newer / "trainer" / "state") in told[0]


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, 1)
    (path / "manifest.json").write_text("{")
    assert latest_valid(tmp_path, lambda line: None) is None
    assert "manifest.json" in str(find_damage(path))


def test_a_step_can_be_committed_again(tmp_path: Path) -> None:
    flip_a_bit(write(tmp_path, 2) / "trainer" / "state")
    path = write(tmp_path, 2, b"anew")
    assert latest_valid(tmp_path) == (2, path)
    assert (path / "trainer" / "state").read_bytes() == b"anew"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    yield from mount_small_disk(tmp_path)


def fill_inodes(disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(100):
            (disk / str(number)).touch()


def test_on_a_full_disk_the_older_checkpoint_survives(small_disk: Path) -> None:
    older = write(small_disk, 1, b"x" * 30_000)
    staged = staging_dir(small_disk, 2)
    (staged / "state").write_bytes(b"y" * 60_000)
    filler = fill_bytes(small_disk)
    with pytest.raises(UserError, match=r"step 2 could not be written. The checkpoint of step 1 survives") as caught:
        commit(small_disk, 2, keep=1)
    assert str(small_disk / "checkpoints" / "step_2") in caught.value.where
    assert not staged.exists()
    assert latest_valid(small_disk) == (1, older)
    filler.unlink()
    write(small_disk, 3, keep=1)
    assert steps(small_disk) == [3]


def test_staging_on_a_full_disk_is_a_user_error(small_disk: Path) -> None:
    fill_inodes(small_disk)
    with pytest.raises(UserError, match="There is no older checkpoint"):
        staging_dir(small_disk, 1)
    assert not step_dir(small_disk, 1).exists()
