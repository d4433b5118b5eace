"""Entry points as processes: exit codes, messages, and nothing left behind."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from prl import status
from prl.compare.columns import swept_columns, value_of
from prl.compare.points import read_directory
from prl.metrics.wandb_mirror import run_settings
from prl.runtime.agent import read_plan

ROOT = Path(__file__).parent.parent


def run(cwd: Path, *args: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}
    return subprocess.run(
        [sys.executable, *args], cwd=cwd, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def run_app(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return run(cwd, str(ROOT / "tests" / "config_app.py"), *args)


def points(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("POINT ")]
    return [json.loads(line.removeprefix("POINT ")) for line in lines]


@pytest.mark.parametrize(("seed", "code"), [(0, 0), (3, 3), (7, 2), (8, 1), (9, 143)])
def test_exit_code_of_a_single_run(tmp_path: Path, seed: int, code: int) -> None:
    done = run_app(tmp_path, f"seed={seed}")
    assert done.returncode == code
    assert list(tmp_path.iterdir()) == [], "Hydra must not write anything of its own"
    assert ("Traceback" in done.stderr) == (seed == 8)


@pytest.mark.parametrize(
    "args",
    [
        ["optim.lrr=1"],
        ["memory=tight", "memory_recipe=none"],
        ["--cfg", "job", "memory=tight", "memory_recipe=none"],
        ["parallelism.ep=3", "parallelism.cp=3"],
        ["seed=1,2"],
        ["algo=[a"],
        ["-m", "seed=1,2", "parallelism.ep=1,3"],
        ["-m", "memory=none,tigth"],
        ["-m", "memory=none,tight", "optim.lrr=1"],
    ],
    ids=" ".join,
)
def test_bad_input_exits_with_2_and_leaves_nothing(tmp_path: Path, args: list[str]) -> None:
    done = run_app(tmp_path, *args)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "do:" in done.stderr or "why:" in done.stderr
    assert points(done) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_multirun_gives_each_point_its_directory(tmp_path: Path) -> None:
    done = run_app(tmp_path, "-m", "hydra.launcher.dry_run=true", "sweep=mine", "memory=none,tight", "seed=5,10")
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "outputs/sweeps/mine"
    listed = json.loads((sweep / "sweep.json").read_text())["points"]
    got = [json.loads((sweep / point["dir"] / "plan.json").read_text())["config"] for point in listed]
    assert [point["swept"] for point in got] == [
        {"memory": memory, "seed": seed} for memory in ("none", "tight") for seed in ("5", "10")
    ]
    assert {point["sweep"] for point in got} == {"mine"}
    assert [point["choices"]["memory_recipe"] for point in got] == ["none", "none", "tight", "tight"]
    assert "/outputs/sweeps/mine/memory-none_seed-5-" in got[0]["output_dir"]
    assert len({point["output_dir"] for point in got}) == 4


@pytest.mark.slow
def test_labels_of_appended_axes_have_no_plus(tmp_path: Path) -> None:
    words = ["-m", "hydra.launcher.dry_run=true", "sweep=mine", "+overlay=one,two", "++seed=1,2"]
    (tmp_path / "own/overlay").mkdir(parents=True)
    for name, steps in (("one", 5), ("two", 6)):
        (tmp_path / f"own/overlay/{name}.yaml").write_text(f"# @package _global_\nmax_steps: {steps}\n")
    done = run_app(tmp_path, "--config-dir", "own", *words)
    assert done.returncode == 0, done.stderr
    sweep = tmp_path / "outputs/sweeps/mine"
    listed = json.loads((sweep / "sweep.json").read_text())["points"]
    assert [point["swept"] for point in listed] == [
        {"overlay": overlay, "seed": seed} for overlay in ("one", "two") for seed in ("1", "2")
    ]
    assert listed[0]["dir"].startswith("overlay-one_seed-1-")
    settings = run_settings(read_plan(sweep / listed[0]["dir"]), "x")
    assert settings["name"] == "overlay=one seed=1"
    points = read_directory(sweep)
    assert swept_columns(points) == ["overlay", "seed"]
    assert [value_of(point, "overlay") for point in points] == ["one", "one", "two", "two"]
    texts = [status.render(sweep)[0], done.stdout]
    assert all("overlay-one_seed-1-" in text for text in texts)
    assert not any("+overlay" in text or "+seed" in text for text in texts)


@pytest.mark.timed
def test_show_config_is_fast_and_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys; sys.argv = ['rl', '--cfg', 'job', 'memory=tight']\n"
        "from prl.rl import main\n"
        "try: main()\n"
        "except SystemExit as stop: assert not stop.code\n"
        "print('LOADED', [m for m in ('pydantic', 'torch', 'vllm', 'wandb', 'transformers') if m in sys.modules])"
    )
    seconds = []
    for _ in range(3):  # the best of three: other tests may be running on the same cores
        start = time.perf_counter()
        done = run(tmp_path, "-c", code)
        seconds.append(time.perf_counter() - start)
        assert "mode: full" in done.stdout
        assert "LOADED []" in done.stdout, done.stderr
    assert min(seconds) < 1.0


def test_importing_prl_loads_nothing_heavy(tmp_path: Path) -> None:
    code = (
        "import sys, prl, prl.config, prl.planning\n"
        "print([m for m in ('torch', 'vllm', 'wandb', 'transformers') if m in sys.modules])"
    )
    assert run(tmp_path, "-c", code).stdout.strip() == "[]"


def test_info_defaults_knows_the_alias(tmp_path: Path) -> None:
    assert "memory_recipe/tight" in run(tmp_path, "-m", "prl.rl", "--info", "defaults", "memory=tight").stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("prl ", "rl sft inference eval bench plan status cancel compare watch doctor"),
        ("prl pl", "plan"),
        ("prl rl memory=ti", "memory=tight"),
        ("prl rl seed=1 optim.l", "optim.lr="),
        ("prl rl -m +sweep=se", "+sweep=seeds"),
        ("prl rl -m +swe", "+sweep="),
        ("prl sft data=", "data=hf data=jsonl data=reverse_text"),
    ],
)
def test_completion(tmp_path: Path, line: str, offered: str) -> None:
    done = run(tmp_path, "-m", "prl.cli", "-sc", "query=bash", env={"COMP_LINE": line})
    assert done.stdout.strip() == offered, done.stderr


@pytest.mark.parametrize("option", ["--config-dir own", "--config-dir=own", "-cd own"])
def test_completion_sees_directories_of_ones_own(tmp_path: Path, option: str) -> None:
    (tmp_path / "own/overlay").mkdir(parents=True)
    (tmp_path / "own/overlay/mine.yaml").write_text("seed: 1\n")
    line = {"COMP_LINE": f"prl rl {option} seed=1 +overlay="}
    done = run(tmp_path, "-m", "prl.cli", "-sc", "query=bash", env=line)
    assert done.stdout.strip() == "+overlay=mine", done.stderr


def test_prl_rl_is_python_m_prl_rl(tmp_path: Path) -> None:
    args = ["--cfg", "job", "memory=tight"]
    assert run(tmp_path, "-m", "prl.cli", "rl", *args).stdout == run(tmp_path, "-m", "prl.rl", *args).stdout != ""


def test_prl_without_a_known_command_says_how(tmp_path: Path) -> None:
    done = run(tmp_path, "-m", "prl.cli", "rll")
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        2,
        "usage: prl {rl,sft,inference,eval,bench,plan,status,cancel,compare,watch,doctor} [overrides]",
    )


def test_a_wheel_carries_the_configs(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, because a build leaves build/ behind
    for folder in ("prl", "conf", "sweeps"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "local"))
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source],
        check=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("prl-*.whl")
    installed = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "zipfile", "-e", wheel, installed], check=True)
    done = run(tmp_path, "-m", "prl.rl", "--cfg", "job", "memory=tight", env={"PYTHONPATH": str(installed)})
    assert "mode: full" in done.stdout, done.stderr
    assert (installed / "prl" / "conf" / "rl.yaml").is_file()
    done = run(tmp_path, "-m", "prl.plan", "-m", "+sweep=seeds", "seed=1,2", env={"PYTHONPATH": str(installed)})
    assert done.stdout.count("point ") == 2, done.stderr
