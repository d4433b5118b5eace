"""Directories and records that this person may not read: a colleague's run in a shared outputs/, say."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment
from test_unreadable_runs import make_run

DROPPED = "-dac_override,-dac_read_search"  # of root's: what lets it read everything


def ask(module: str, *arguments: str, cwd: Path) -> tuple[int, str]:
    """As somebody whom permissions hold for. Returns the exit code and all that was printed."""
    front = ["setpriv", "--bounding-set", DROPPED, "--inh-caps", DROPPED] if os.geteuid() == 0 else []
    if front and shutil.which("setpriv") is None:
        pytest.skip("root reads everything, and setpriv is not here to change that")
    command = [*front, sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    assert "Traceback" not in said, said
    return done.returncode, said


@pytest.fixture
def sweep(tmp_path: Path):
    for name in ("one", "other"):
        make_run(tmp_path / "s" / name, {"seed": "1"})
    points = [{"dir": name, "point_id": "p", "swept": {}} for name in ("one", "other")]
    (tmp_path / "s/sweep.json").write_text(json.dumps({"points": points}))
    yield tmp_path / "s"
    for path in (tmp_path / "s", tmp_path / "s/other", tmp_path / "s/sweep.json"):
        path.chmod(0o755)


def test_a_run_that_may_not_be_read_is_named_beside_the_others(sweep: Path) -> None:
    (sweep / "other").chmod(0)
    code, said = ask("prl.status", str(sweep), cwd=sweep)
    rows = {line.split()[0]: line for line in said.splitlines()}
    assert (code, rows["one"].split()[1], rows["other"].split()[1]) == (0, "done", "unreadable")
    assert "other cannot be read: Permission denied" in rows["other"]
    code, said = ask("prl.cancel", str(sweep), cwd=sweep)
    assert (code, "nothing was running" in said) == (1, True)
    code, said = ask("prl.compare", str(sweep), cwd=sweep)
    assert (code, "unreadable" in said) == (0, True)


def test_what_is_no_point_and_may_not_be_read_is_passed_over(sweep: Path) -> None:
    (sweep / "sweep.json").unlink()
    (sweep / "other").chmod(0)
    for module, expected in (("prl.status", 0), ("prl.cancel", 1), ("prl.compare", 0)):
        assert ask(module, str(sweep), cwd=sweep)[0] == expected
    (sweep / "sweep.json").touch()


LOOKING = ["prl.status", "prl.cancel", "prl.compare", "prl.watch"]


@pytest.mark.parametrize("module", LOOKING)
def test_below_a_directory_that_may_not_be_read_nothing_is_said_to_be_absent(sweep: Path, module: str) -> None:
    sweep.chmod(0)
    code, said = ask(module, str(sweep / "one"), cwd=sweep.parent)
    assert code == 2
    assert f"{sweep}/one cannot be read." in said


@pytest.mark.parametrize("module", LOOKING)
def test_a_directory_that_may_not_be_read_is_no_empty_one(sweep: Path, module: str) -> None:
    sweep.chmod(0)
    code, said = ask(module, str(sweep), cwd=sweep.parent)
    assert code == 2
    assert f"{sweep} cannot be read." in said
    assert "Permission denied" in said


@pytest.mark.parametrize("module", ["prl.status", "prl.cancel"])
def test_a_record_that_may_not_be_read_is_not_damaged(sweep: Path, module: str) -> None:
    (sweep / "sweep.json").chmod(0)
    _, said = ask(module, str(sweep), cwd=sweep)
    assert "sweep.json cannot be read." in said
    assert "damaged" not in said


def test_links_that_lead_to_themselves_hold_no_run(sweep: Path) -> None:
    shutil.rmtree(sweep / "other")
    for name in ("other", "loop"):  # a point, and none
        (sweep / name).symlink_to(name)
    for module in ("prl.status", "prl.compare"):
        code, said = ask(module, str(sweep), cwd=sweep)
        (row,) = [line for line in said.splitlines() if "other cannot be read: Too many levels of symbolic" in line]
        assert (code, "unreadable" in row, "loop" in said) == (0, True, False)
    (sweep / "other").unlink()
    (sweep / "other").mkdir()


def configs(tmp_path: Path) -> Path:
    for group in ("overlay", "model", "sweeps"):
        (tmp_path / "own" / group).mkdir(parents=True)
    (tmp_path / "own/overlay/fine.yaml").write_text("# @package _global_\nseed: 3\n")
    (tmp_path / "own/overlay/lost.yaml").symlink_to("nowhere.yaml")
    (tmp_path / "own/model/lost.yaml").symlink_to("lost.yaml")  # itself
    (tmp_path / "own/sweeps/lost.yaml").symlink_to("nowhere.yaml")
    return tmp_path / "own"


@pytest.mark.parametrize(
    ("closed", "words", "named"),
    [
        ("own", ["seed=2"], "own"),
        ("own/overlay", ["+overlay=fine"], "own/overlay"),
        ("own/sweeps", ["-m", "+sweep=fine"], "own/sweeps"),
        ("own/model", ["+overlay=fine"], ""),  # nobody asked for it
    ],
)
def test_configurations_that_may_not_be_read(tmp_path: Path, closed: str, words: list[str], named: str) -> None:
    own = configs(tmp_path)
    (tmp_path / closed).chmod(0)
    code, said = ask("prl.plan", "--config-dir", str(own), *words, cwd=tmp_path)
    (tmp_path / closed).chmod(0o755)
    assert code == (2 if named else 0), said
    assert not named or f"{tmp_path / named} cannot be read.\n  where: --config-dir={own}" in said


@pytest.mark.parametrize(
    ("words", "file"),
    [
        (["+overlay=lost"], "overlay/lost.yaml"),
        (["model=lost"], "model/lost.yaml"),
        (["-m", "+sweep=lost"], "sweeps/lost.yaml"),
    ],
)
def test_a_choice_that_is_a_link_to_nowhere_is_told_as_one(tmp_path: Path, words: list[str], file: str) -> None:
    own = configs(tmp_path)
    code, said = ask("prl.plan", "--config-dir", str(own), *words, cwd=tmp_path)
    assert (code, "lost.yaml is not read." in said) == (2, True), said
    assert f"{own / file} is a link to" in said


@pytest.mark.parametrize("module", [*LOOKING, "prl.plan"])
def test_a_working_directory_that_is_gone_is_said_to_be(tmp_path: Path, module: str) -> None:
    shell = f"mkdir gone; cd gone; rmdir ../gone; exec {shlex.quote(sys.executable)} -m {module} "
    shell += "seed=1" if module == "prl.plan" else "x"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert (done.returncode, "orking directory is gone" in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr


def test_a_working_directory_that_may_not_be_entered_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir()
    here = os.open(tmp_path / "closed", os.O_PATH)
    (tmp_path / "closed").chmod(0)
    code, said = ask("prl.plan", "seed=1", cwd=Path(f"/proc/self/fd/{here}"))
    os.close(here)
    assert (code, "may not be entered" in said) == (2, True), said
