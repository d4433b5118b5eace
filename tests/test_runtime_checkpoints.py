"""Checkpoints are complete or absent, damage is found, a full disk costs only the newest."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from runtime_tree import fill_bytes, mount_small_disk, wait_for

from prl.config import compose
from prl.config.errors import UserError
from prl.runtime.directory import checksums, commits
from prl.runtime.directory.checkpoints import (
    commit,
    discard_after,
    find_damage,
    latest_valid,
    parts_of,
    staging_dir,
    step_dir,
    steps,
)
from prl.runtime.directory.commits import CommitStalled, Committer
from prl.runtime.launch import _prepare_resume
from prl.runtime.process.failures import classify, error_record, parse_error_record

PARTS = parts_of("rl")


def write(run_dir: Path, step: int, content: bytes = b"weights", keep: int = 9) -> Path:
    for part in ("trainer", "orchestrator"):
        (staging_dir(run_dir, step) / part).mkdir()
        (staging_dir(run_dir, step) / part / "state").write_bytes(content)
    return commit(run_dir, step, keep, PARTS)


def test_commit_makes_it_the_newest(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = write(tmp_path, 10)
    assert latest_valid(tmp_path, PARTS) == (10, path)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_10", "step_2"]


def test_none_is_none(tmp_path: Path) -> None:
    assert latest_valid(tmp_path, PARTS) is None


def test_what_is_not_committed_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, 2)
    (staging_dir(tmp_path, 4) / "state").write_text("half")
    found = latest_valid(tmp_path, PARTS)
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
    assert latest_valid(tmp_path, PARTS, told.append) == (1, older)
    assert len(told) == 1
    assert str(newer / "trainer" / "state") in told[0]


@pytest.mark.parametrize("name", ["manifest.json", "trainer/state"])
def test_what_cannot_be_read_now_is_neither_skipped_nor_removed(tmp_path: Path, monkeypatch, name: str) -> None:
    older, newer = write(tmp_path, 1), write(tmp_path, 2)
    where, how = (Path, "read_text") if name == "manifest.json" else (checksums, "_crc32")
    read = getattr(where, how)

    def stale(path: Path, *arguments: Any) -> Any:
        if path == newer / name:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return read(path, *arguments)

    monkeypatch.setattr(where, how, stale)
    with pytest.raises(UserError, match="The checkpoint of step 2 cannot be read now: Stale file handle"):
        latest_valid(tmp_path, PARTS)
    assert older.is_dir()
    assert newer.is_dir()


def test_a_directory_of_checkpoints_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path, monkeypatch) -> None:
    write(tmp_path, 2)
    listed = os.listdir

    def refused(path: Path) -> list[str]:
        if Path(path).name == "checkpoints":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listed(path)

    monkeypatch.setattr(os, "listdir", refused)
    with pytest.raises(UserError, match="checkpoints cannot be read"):
        latest_valid(tmp_path, PARTS)


@pytest.mark.parametrize("how", ["copied", "linked"])
def test_a_checkpoint_under_the_name_of_another_step_is_none_of_it(tmp_path: Path, how: str) -> None:
    path, other = write(tmp_path, 6), step_dir(tmp_path, 8)
    shutil.copytree(path, other) if how == "copied" else other.symlink_to(path)
    told: list[str] = []
    assert latest_valid(tmp_path, PARTS, told.append) == (6, path)
    assert told == [f"checkpoint of step 8 is damaged and skipped: {other}/manifest.json says that it is of step 6"]


@pytest.mark.parametrize("content", ["{", "{}", "[]", "null", '{"files": 3}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, 1)
    (path / "manifest.json").write_text(content)
    assert latest_valid(tmp_path, PARTS, lambda line: None) is None
    assert find_damage(path, PARTS) == f"{path}/manifest.json does not say which files there are"


def test_a_step_can_be_committed_again(tmp_path: Path) -> None:
    flip_a_bit(write(tmp_path, 2) / "trainer" / "state")
    path = write(tmp_path, 2, b"anew")
    assert latest_valid(tmp_path, PARTS) == (2, path)
    assert (path / "trainer" / "state").read_bytes() == b"anew"


def test_a_second_call_for_a_committed_step_does_nothing(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    (staging_dir(tmp_path, 2) / "orchestrator").mkdir()  # a late caller's half
    (staging_dir(tmp_path, 2) / "orchestrator" / "state").write_text("late")
    assert commit(tmp_path, 2, keep=9, parts=PARTS) == path
    assert (path / "orchestrator" / "state").read_bytes() == b"weights"
    assert [entry.name for entry in (tmp_path / "checkpoints").iterdir()] == ["step_2"]


@pytest.mark.parametrize("half", PARTS)
def test_half_a_checkpoint_is_never_committed_and_never_valid(tmp_path: Path, half: str) -> None:
    older = write(tmp_path, 2)
    (staging_dir(tmp_path, 4) / half).mkdir()
    (staging_dir(tmp_path, 4) / half / "state").write_text("half")
    with pytest.raises(RuntimeError, match="has no part"):
        commit(tmp_path, 4, keep=9, parts=PARTS)
    commit(tmp_path, 4, keep=9, parts=(half,))  # what a job of another kind, or an earlier version, has made
    told: list[str] = []
    assert latest_valid(tmp_path, PARTS, told.append) == (2, older)
    assert "is missing" in told[0]


def test_two_who_commit_one_step_share_the_work(tmp_path: Path) -> None:
    for part in PARTS:
        (staging_dir(tmp_path, 1) / part).mkdir()
        (staging_dir(tmp_path, 1) / part / "state").write_text("state")
    prepared: list[int] = []
    committer = Committer(tmp_path, keep=2, parts=PARTS, hang_timeout_s=60)
    with ThreadPoolExecutor(4) as pool:
        begun = list(pool.map(lambda _: committer.start(1, prepare=lambda: prepared.append(1)), range(8)))
    assert sorted(begun) == [False] * 7 + [True]
    assert prepared == [1]
    wait_for(lambda: committer.is_done(1))
    assert latest_valid(tmp_path, PARTS) == (1, step_dir(tmp_path, 1))
    assert not committer.is_done(2), "nobody has asked for it"


def test_a_commit_that_fails_is_told_and_one_that_stands_still_too(tmp_path: Path, monkeypatch) -> None:
    committer = Committer(tmp_path, keep=2, parts=PARTS, hang_timeout_s=0.2)
    committer.start(1)
    with pytest.raises(RuntimeError, match="has no part"):
        wait_for(lambda: committer.is_done(1))
    stuck = threading.Event()
    monkeypatch.setattr(commits, "commit", lambda *arguments: stuck.wait(60))
    committer = Committer(tmp_path, keep=2, parts=PARTS, hang_timeout_s=0.2)
    committer.start(1)
    with pytest.raises(CommitStalled, match="stands still") as caught:
        wait_for(lambda: committer.is_done(1))
    stuck.set()
    record = parse_error_record(error_record(caught.value))
    assert classify("orchestrator", 1, record, (), oom_kills=0) == "hang"


def test_large_files_have_a_checksum_for_each_piece(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(checksums, "PIECE_BYTES", 1000)
    path = write(tmp_path, 2, os.urandom(4321))
    assert len(json.loads((path / "manifest.json").read_text())["files"]["trainer/state"]["crc32"]) == 5
    assert find_damage(path, PARTS) is None
    content = bytearray((path / "trainer" / "state").read_bytes())
    content[3999] ^= 1
    (path / "trainer" / "state").write_bytes(content)
    assert str(path / "trainer" / "state") in str(find_damage(path, PARTS))


def test_manifests_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = write(tmp_path, 2)
    manifest = json.loads((path / "manifest.json").read_text())
    for about in manifest["files"].values():
        about["crc32"] = zlib.crc32(b"weights")
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert find_damage(path, PARTS) is None
    flip_a_bit(path / "trainer" / "state")
    assert "another checksum" in str(find_damage(path, PARTS))


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
    for part in PARTS:
        (staged / part).mkdir()
        (staged / part / "state").write_bytes(b"y" * 30_000)
    filler = fill_bytes(small_disk)
    with pytest.raises(UserError, match=r"step 2 could not be written. The checkpoint of step 1 survives") as caught:
        commit(small_disk, 2, keep=1, parts=PARTS)
    assert str(small_disk / "checkpoints" / "step_2") in caught.value.where
    assert not staged.exists()
    assert latest_valid(small_disk, PARTS) == (1, older)
    filler.unlink()
    write(small_disk, 3, keep=1)
    assert steps(small_disk) == [3]


def test_staging_on_a_full_disk_is_a_user_error(small_disk: Path) -> None:
    fill_inodes(small_disk)
    with pytest.raises(UserError, match="There is no older checkpoint"):
        staging_dir(small_disk, 1)
    assert not step_dir(small_disk, 1).exists()


@pytest.mark.parametrize(
    ("step", "damaged", "said"),
    [
        (0, False, ""),
        (8, False, "there is no checkpoint of what was trained before: starting from the beginning"),
        (8, True, "no checkpoint is usable: starting from the beginning"),
    ],
)
def test_a_resume_says_that_it_starts_from_the_beginning(tmp_path: Path, step: int, damaged: bool, said: str) -> None:
    (tmp_path / "status.json").write_text(json.dumps({"state": "failed", "job": "rl", "step": step}))
    if damaged:
        cut_short(write(tmp_path, 8) / "trainer/state")
    notes: list[str] = []
    progress: Any = SimpleNamespace(note=notes.append)
    assert _prepare_resume(tmp_path, compose([]), progress) == 0
    assert [note for note in notes if "damaged and skipped" not in note] == ([said] if said else [])
