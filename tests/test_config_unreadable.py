"""Files of the user's own directory that cannot be read: told with file, line and reason, if they are chosen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from runs import environment

NOT_UTF8 = b'seed: 1\nname: "\xe9"\n'
FILES = {
    "overlay/broken.yaml": b"seed: 1\noptim: [\n",
    "overlay/latin.yaml": NOT_UTF8,
    "overlay/twice.yaml": b"seed: 1\nseed: 2\n",
    "overlay/control.yaml": b"seed: 1\nname: a\x01b\n",
    "overlay/fine.yaml": b"# @package _global_\nseed: 3\n",
    "hydra/launcher/mine.yaml": b"mode: [\n",
    "sweeps/broken.yaml": b"hydra: {\n",
    "sweeps/latin.yaml": NOT_UTF8,  # the same bytes
    "sweeps/fine.yaml": b"hydra: {sweeper: {params: {seed: '1,2'}}}\n",
}


def command(cwd: Path, module: str, *words: str) -> subprocess.CompletedProcess[str]:
    for name, data in FILES.items():
        (cwd / "own" / name).parent.mkdir(parents=True, exist_ok=True)
        (cwd / "own" / name).write_bytes(data)
    line = [sys.executable, "-m", f"prl.{module}", "--config-dir", "own", *words]
    return subprocess.run(line, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words", "files"),
    [
        ("rl", ["+overlay=broken"], {"overlay/broken.yaml, line 3": "found '<stream end>'"}),
        ("plan", ["+overlay=latin"], {"overlay/latin.yaml, line 2": "it is not UTF-8"}),
        ("plan", ["+overlay=twice"], {"overlay/twice.yaml, line 2": "found duplicate key seed"}),
        ("plan", ["+overlay=control"], {"overlay/control.yaml, line 2": "special characters"}),
        ("rl", ["-m", "hydra.launcher.dry_run=true", "+overlay=fine,broken,latin"],
         {"overlay/broken.yaml, line 3": "found '<stream end>'", "overlay/latin.yaml, line 2": "it is not UTF-8"}),
        ("rl", ["hydra/launcher=mine"], {"hydra/launcher/mine.yaml, line 2": "found '<stream end>'"}),
        ("rl", ["-m", "+sweep=broken"], {"sweeps/broken.yaml, line 2": "found '<stream end>'"}),
        ("rl", ["-m", "+sweep=latin"], {"sweeps/latin.yaml, line 2": "it is not UTF-8"}),
    ],
)  # fmt: skip
def test_a_chosen_file_is_told_with_its_line(tmp_path, module, words, files):
    done = command(tmp_path, module, *words)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("cannot be read.") == done.stderr.count("do:") == len(files)
    for where, why in files.items():
        assert f"where: {tmp_path}/own/{where}" in done.stderr, done.stderr
        assert why in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["own"], "nothing is made"


@pytest.mark.slow
def test_files_that_are_not_chosen_do_not_matter(tmp_path):
    done = command(tmp_path, "plan", "-m", "+overlay=fine", "+sweep=fine")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trainer/0") == 2
