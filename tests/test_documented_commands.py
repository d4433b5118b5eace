"""Every command that a README shows is one that prl takes: its keys and choices exist, and every rule lets it pass."""

from __future__ import annotations

import functools
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launch.hydra_plugin import register_plugins
from prl.config.composing import compose, problems
from prl.config.search_path import use_directories
from prl.config.sweep import corners, expand, makes_a_grid, resolve_points, sweep_lines
from prl.planning import make_plan, plan_to_json

ROOT = Path(__file__).parents[1]
JOBS = {
    "rl": "rl",
    "sft": "sft",
    "bench": "bench",
    "eval": "eval",
    "inference": "inference",
    "plan": "rl",
    "doctor": "rl",
}  # -> primary config
COMMAND = re.compile(r"^ {4,}(?:.*; )?(?:python|torchrun .*?) -m prl\.(\w+)(.*)$")
END = re.compile(r"(?:^|\s)#\s|\s{3,}|; |, (?=\w+=)")  # of the command; what follows is said about it
TO_FILL_IN = re.compile(r"^(\.\.\.|\$.*|\[.*|.*\]|.*=[A-Z_/]+|.*=\.\.\.)$")


def documented() -> Iterator[tuple[str, list[str]]]:
    """(file: command, its words), each from a line that holds nothing else; continued lines are one."""
    for path in sorted([*ROOT.glob("*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("prl/**/README.md")]):
        for line in path.read_text().replace("\\\n", " ").splitlines():
            found = COMMAND.match(line)
            if found and found[1] in JOBS:
                words = [found[1], *shlex.split(END.split(found[2].strip(), maxsplit=1)[0])]
                yield f"{path.relative_to(ROOT)}: {' '.join(words)}", words


CASES = dict(documented())


def test_there_are_many() -> None:
    assert len(CASES) > 40


@pytest.fixture
def my_configs(tmp_path: Path) -> Iterator[Path]:
    """What conf/README.md says that a user's own directory may hold."""
    files = {
        "overlay/mine.yaml": "# @package _global_\ndefaults:\n  - override /algo: sync\n",
        "model/ours.yaml": (ROOT / "conf/model/tiny_qwen3.yaml").read_text(),
        "sweeps/ours.yaml": "hydra:\n  sweeper:\n    params:\n      seed: 1,2\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    yield tmp_path
    use_directories(None, [])


@pytest.fixture(scope="module")
def plan_of_a_run() -> Callable[[str], str]:
    """By its job."""
    return functools.cache(lambda job: plan_to_json(make_plan(compose([], job))))


@pytest.mark.parametrize("command", CASES)
def test_a_documented_command_is_taken(
    command: str, my_configs: Path, plan_of_a_run: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, *words = CASES[command]
    if {"eval.run=outputs/RUN", "ckpt.from_run=outputs/RUN"} & {*words}:
        (my_configs / "outputs/RUN/checkpoints/step_100").mkdir(parents=True)
        (my_configs / "outputs/RUN/plan.json").write_text(plan_of_a_run("sft" if JOBS[job] == "sft" else "rl"))
        monkeypatch.chdir(my_configs)
    if "--config-dir" in words or any(word.startswith("hydra.searchpath=") for word in words):
        use_directories(str(my_configs), [])
    words = [word for word in words if not word.startswith("hydra.searchpath=")]
    register_plugins()
    name = words[words.index("-cn") + 1] if "-cn" in words else JOBS[job]
    lines = [word for word in words if re.match(r"~|[+]{0,2}[\w./]+=", word)]
    whole = [line for line in lines if not TO_FILL_IN.match(line)]
    assert not problems(whole, name)
    if not any(TO_FILL_IN.match(word) for word in words):  # else what it lacks may be what the rules ask for
        points = sweep_lines(whole, name)
        assert resolve_points(expand(points) if makes_a_grid(points, name) else corners(points), name, set())
