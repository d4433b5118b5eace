"""A disk that fills up may have room again: who finds it full says so, and what it has begun goes on from there."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from runtime_tree import fill_bytes, mount_small_disk
from weight_updates import published

from launch.places import refusal
from prl.config import compose
from prl.config.errors import AwayError, PassingError, UserError
from prl.planning.planner import make_plan
from prl.runtime import launch
from prl.runtime.agent import conclude
from prl.runtime.directory.checkpoints import full_disk_error
from prl.runtime.directory.files import as_user_error
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import read_attempts
from prl.runtime.process.failures import Failure, classify, error_record, parse_error_record
from prl.transport import weights_shared
from prl.transport.weights import SharedMemoryPublisher
from prl.transport.weights_files import FilesystemPublisher
from prl.transport.weights_lora import AdapterPublisher

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small_disk(tmp_path: Path):
    yield from mount_small_disk(tmp_path / "disk")


@pytest.mark.parametrize("name", ["logs", "weights"])
@pytest.mark.parametrize("error", [PermissionError, FileExistsError])
def test_what_a_run_may_not_use_in_its_directory_is_told_and_nothing_else(tmp_path: Path, error, name: str) -> None:
    def told(path: Path) -> UserError | None:
        return as_user_error(error(errno.EACCES, os.strerror(errno.EACCES), str(path)), tmp_path / "run")

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).symlink_to("gone")
    found = told(tmp_path / "run" / name)
    assert found is not None
    assert found.what.startswith(f"{tmp_path}/run/{name} cannot be used: Permission denied")
    assert f"ls -ld {tmp_path}/run/{name}" in found.fix
    absent = told(tmp_path / "run/checkpoints/step_6.partial")
    assert absent is not None
    assert absent.where == f"{tmp_path}/run", "in which it was to be made"
    assert told(tmp_path / "data") is None
    assert told(tmp_path / "run-2/logs") is None


def test_of_a_copy_the_file_that_was_to_be_written_is_named(tmp_path: Path):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/code/plan.py", None, "/sweep/code/plan.py")
    for told in (as_user_error(error, tmp_path), refusal(error, tmp_path)):
        assert told is not None
        assert told.what == "The disk is full: /sweep/code/plan.py could not be written."


def class_of(error: UserError) -> str:
    return classify("trainer", 2, parse_error_record(error_record(error)), (), 0)


@pytest.mark.parametrize("adapters", [False, True], ids=["weights", "adapters"])
def test_a_disk_that_fills_while_weights_are_published_may_pass(small_disk: Path, adapters: bool):
    place = small_disk / "weights"
    publisher = AdapterPublisher(place, 2, {}) if adapters else FilesystemPublisher(place, keep=2)
    filler = fill_bytes(small_disk)
    with pytest.raises(Exception, match="No space left") as caught:
        published(publisher, 1, [("a", torch.ones(9999))])
    told = as_user_error(caught.value, small_disk)
    assert told is not None
    assert class_of(told) == "node"
    assert Path(told.where).exists()
    filler.unlink()
    published(publisher, 1, [("a", torch.ones(9999))])


def test_weights_that_cannot_be_written_otherwise_would_fail_again(tmp_path: Path, monkeypatch):
    def refuse(*given):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    publisher = FilesystemPublisher(tmp_path / "weights", keep=2)
    monkeypatch.setattr("prl.transport.weights_files.save_tensors", refuse)
    with pytest.raises(UserError) as caught:
        published(publisher, 1, [("a", torch.ones(9))])
    assert class_of(caught.value) == "config"


@pytest.mark.parametrize(("blocks", "kind"), [(1 << 20, "node"), (1, "config")], ids=["full", "too small"])
def test_shared_memory_passes_if_it_is_others_who_fill_it(tmp_path, monkeypatch, blocks, kind):
    def full(*args):
        raise FULL

    monkeypatch.setattr(weights_shared.os, "posix_fallocate", full)
    monkeypatch.setattr(weights_shared.os, "statvfs", lambda path: SimpleNamespace(f_blocks=blocks, f_frsize=4096))
    with pytest.raises(UserError) as caught:
        published(SharedMemoryPublisher(tmp_path / "segment"), 1, [("a", torch.ones(9999))])
    assert class_of(caught.value) == kind


@pytest.mark.parametrize(("whole", "kind"), [(4096, "node"), (4 * 4096, "config")], ids=["full", "too small for all"])
def test_shared_memory_must_hold_what_all_ranks_have(tmp_path, monkeypatch, whole, kind):
    def full(*args):
        raise FULL

    monkeypatch.setattr(weights_shared.os, "posix_fallocate", full)
    monkeypatch.setattr(weights_shared.os, "statvfs", lambda path: SimpleNamespace(f_blocks=2, f_frsize=4096))
    with pytest.raises(UserError) as caught:
        weights_shared._make_segment(tmp_path / "segment-1", 4096, 1, whole)
    assert class_of(caught.value) == kind


def test_a_disk_that_fills_while_a_checkpoint_is_written_may_pass(tmp_path: Path):
    assert class_of(full_disk_error(tmp_path, 3)) == "node"


def test_a_directory_that_a_full_disk_does_not_take_may_pass(tmp_path: Path, monkeypatch):
    def refuse(*given, **named):
        raise FULL

    plan = make_plan(compose([f"output_dir={tmp_path / 'r'}"]))
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(UserError) as caught:
        claim(plan)
    assert class_of(caught.value) == "node"


@pytest.mark.parametrize(
    ("error", "requeued"), [(PassingError("full"), True), (AwayError("gone"), True), (UserError("no"), False)]
)
def test_slurm_tries_again_what_may_pass_at_a_start(tmp_path: Path, error: UserError, requeued: bool):
    plan = make_plan(compose([f"output_dir={tmp_path}"]))
    assert conclude(plan, tmp_path, "7", [], 2, error, None) == requeued
    assert read_attempts(tmp_path)[-1]["class"] == ("node" if requeued else "config")


@pytest.mark.parametrize(
    ("kind", "error_type", "is_kept"), [("node", PassingError, True), ("config", UserError, False)]
)
def test_a_run_that_found_the_disk_full_before_its_first_step_is_there_to_be_read(
    tmp_path: Path, monkeypatch, kind, error_type, is_kept
):
    def fail(plan, run_dir, *given):
        (run_dir.path / "logs").mkdir()
        parts = {"what": "The disk is full.", "where": "", "why": "", "fix": ""}
        launch._tell_failure(Failure(kind, "trainer/0", 0, 0, "m", "", (), parts))

    monkeypatch.setattr(launch, "_run_claimed", fail)
    with pytest.raises(error_type):
        launch.run(compose([f"output_dir={tmp_path / 'r'}", "warm_start=none", f"cache_dir={tmp_path}/cache"]))
    assert (tmp_path / "r" / "logs").exists() == is_kept
