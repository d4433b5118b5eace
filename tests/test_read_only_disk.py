"""A disk that becomes read-only under a run: how it ended is told in sentences, and the same command resumes."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from runtime_tree import Start, mount_small_disk, start, wait_for  # noqa: F401

from prl.config.errors import PassingError
from prl.runtime import launch
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.files import as_user_error
from prl.runtime.nodes.remote import Nodes
from prl.runtime.people import for_people
from prl.runtime.process.failures import Failure, classify, error_record, parse_error_record

READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS), "/run/control_key")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    yield from mount_small_disk(tmp_path / "disk", "size=4m")


@pytest.fixture
def no_removal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given, **more):
        raise READ_ONLY

    monkeypatch.setattr(Path, "unlink", refuse)


def test_a_key_that_cannot_be_removed_hides_not_how_a_run_ended(tmp_path: Path, no_removal: None) -> None:
    for_people.take_back_keys(tmp_path)
    nodes = Nodes()
    nodes.announced.append(tmp_path / "meeting")
    nodes.end("failed")


def test_it_is_told_where_and_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = as_user_error(READ_ONLY, tmp_path)
    assert isinstance(told, PassingError)
    record = parse_error_record(error_record(told))  # as the root gets it from a role
    assert classify("trainer", 1, record, (), 0) == "node"
    failure = Failure("node", "a", 0, 0, told.what, "log", (), record["user_error"], record["type"])
    launch._tell_failure(failure)  # raises nothing: code 1
    shown = capsys.readouterr().err
    assert "read-only: /run/control_key could not be written" in shown
    assert f"where: {tmp_path}" in shown
    assert f"the same command, a sweep's too, resumes (a run by itself: with output_dir={tmp_path})" in shown


def test_it_is_known_by_its_type_and_not_by_its_words(tmp_path: Path) -> None:
    """Whatever is said of it, and of whatever else that is said."""
    told = as_user_error(READ_ONLY, tmp_path)
    assert told is not None
    parts = {"what": "other words", "where": told.where, "why": told.why, "fix": told.fix}
    assert launch._tell_read_only(type(told)(**parts))
    assert not launch._tell_read_only(PassingError(told.what))
    with pytest.raises(PassingError):
        launch._tell_failure(Failure("node", "a", 0, 0, told.what, "log", (), parts, "PassingError"))


def test_a_run_ends_in_sentences_and_resumes(start: Start, disk: Path) -> None:  # noqa: F811
    place = disk / "run"
    root = start("max_steps=60", f"output_dir={place}", name="disk/run")
    wait_for(lambda: bool(steps(place)))
    subprocess.run(["mount", "--bind", disk, disk], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", disk], check=True)
        code, output = root.wait()
    finally:
        subprocess.run(["umount", "-l", disk], check=True)
    assert code == 1, output
    assert "Traceback" not in output
    assert "The file system has become read-only" in output
    assert f"output_dir={place}" in output
    code, output = start("max_steps=60", f"output_dir={place}", name="disk/run").wait()
    assert code == 0, output
    assert "resuming from the checkpoint" in output
