"""Sweeps on a disk that is full, or where something is in the way: told, nothing half made stays."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import run
from runtime_tree import mount_small_disk

from launch import slurm
from launch.code_copy import FrozenCode
from launch.places import telling_places
from launch.settings import LauncherSettings
from prl.config.errors import UserError

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture(params=[0, 12, 400], ids="{} KiB".format)
def room(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def disk(room: int, tmp_path: Path):
    """With room for nothing; for the record of the sweep; for its points, but not for the copy of the code."""
    for path in mount_small_disk(tmp_path / "disk", "size=64m"):
        (path / "ballast").write_bytes(bytes((65536 - room) << 10))
        yield path


@pytest.mark.slow
def test_a_full_disk_is_told_and_the_same_command_goes_on(disk: Path, room: int, tmp_path: Path) -> None:
    lines = ["-m", "hydra/launcher=local", f"hydra.sweep.dir={disk}/s", "seed=1", "max_steps=1", "seq_len=64"]
    lines += ["sft.batch_size=2", "ckpt.export_hf=false", "logging=none", f"cache_dir={tmp_path}/cache"]
    done = run(lines, tmp_path, "prl.sft")
    assert done.code == 2, done.output
    assert "No space left on device" in done.output
    assert "Traceback" not in done.output
    assert not list(disk.rglob("*.partial"))
    assert (disk / "s" / "code").exists() == (room == 400)
    if room == 400:
        (disk / "ballast").unlink()
        done = run(lines, tmp_path, "prl.sft")
        assert done.code == 0, done.output
        assert len(list(disk.glob("s/*/status.json"))) == 1


def test_a_job_that_cannot_be_recorded_is_taken_back(tmp_path, monkeypatch, capsys):
    """Else the same command would submit its points again, and prl.cancel would not know it."""
    programs = {"sbatch": "echo Submitted batch job 7", "scancel": f"echo $1 >> {tmp_path}/cancelled"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    shape = SimpleNamespace(describe=lambda: "1 node")
    batch = SimpleNamespace(points=[SimpleNamespace(path=tmp_path / "p")], is_array=False, shape=shape)
    monkeypatch.setattr(slurm, "freeze_code", lambda *given: FrozenCode(tmp_path, {}))
    monkeypatch.setattr(slurm, "make_batches", lambda *given: [batch])
    monkeypatch.setattr(slurm, "render", lambda *given: "#!/bin/bash\n")
    (tmp_path / "sweep.json").mkdir()
    with pytest.raises(UserError, match=r"sweep\.json"), telling_places(tmp_path):
        slurm.submit(batch.points, tmp_path, LauncherSettings(max_array_size=9))
    assert (tmp_path / "cancelled").read_text() == "7\n"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS])
def test_what_places_refuse_is_told(tmp_path, number):
    with pytest.raises(UserError) as told, telling_places(tmp_path):
        raise OSError(number, os.strerror(number), str(tmp_path / "slurm"))
    assert str(tmp_path / "slurm") in told.value.what
    assert "the same command" in told.value.fix


def test_what_is_no_place_is_a_bug_of_ours(tmp_path):
    with pytest.raises(ConnectionResetError), telling_places(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")
