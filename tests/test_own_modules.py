"""Modules of the user's own: found without importing them, importable in every process of a run, wherever it starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import UNEVALUATED, environment

import prl
from launch.code_copy import freeze_code
from prl.config import compose
from prl.runtime.directory.own_modules import describe_modules, files_of, find_own_modules, hash_of

ENVIRONMENT = """
from prl.envs.protocol import Environment, Task, user
from shout_words import WORDS


class Shout(Environment):
    def tasks(self, split):
        mine = WORDS[::2] if split == "train" else WORDS[1::2]
        return [Task(word, (user(word),), {"answer": word.upper()}) for word in mine]

    def reward(self, task, messages):
        return float(messages[-1]["content"] == task.info["answer"])
"""
OTHER_PRL = "raise SystemExit('a prl of the current directory')"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with my_envs/shout.py, what that imports, and things that are named but not meant."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_envs").mkdir()
    (tmp_path / "my_envs" / "shout.py").write_text(ENVIRONMENT)
    (tmp_path / "my_envs" / "words.txt").write_text("data beside the code")
    (tmp_path / "shout_words.py").write_text("import json, torch, far_away\nWORDS = ['one', 'two', 'three', 'four']\n")
    (tmp_path / "far_away.py").write_text("def broken(:\n")
    (tmp_path / "reverse_text").mkdir()  # an environment of that name is built in
    (tmp_path / "unrelated.py").write_text("")
    return tmp_path


def shout(env_id: str = "my_envs.shout:Shout", args: str = "{}") -> str:
    return f'+env.mix={{shout: {{id: "{env_id}", args: {args}}}}}'


def test_a_module_is_found_with_what_it_imports(here: Path) -> None:
    found = find_own_modules(compose([shout()]))
    assert found == {name: here / file for name, file in FOUND.items()}


FOUND = {"far_away": "far_away.py", "my_envs": "my_envs", "shout_words": "shout_words.py"}


@pytest.mark.parametrize(
    ("overrides", "names"),
    [
        (["seed=1"], []),
        ([shout("verifiers", "{id: unrelated}")], ["unrelated"]),
        ([shout("verifiers", "{id: 'unrelated:load'}")], ["unrelated"]),
        ([shout("reverse_text", "{rubric: 'unrelated:judge', words: unrelated}")], ["unrelated"]),
        ([shout("json:JSONDecoder")], []),
        ([shout("torch.nn:Module")], []),
        ([shout("prl.envs.countdown:Countdown")], []),
        ([shout("nowhere:Env")], []),
    ],
)
def test_what_is_named_is_found_and_installed_packages_are_not(here: Path, overrides, names) -> None:
    assert list(find_own_modules(compose(overrides))) == names


def test_the_hash_tells_an_edit_of_any_file(here: Path) -> None:
    before = describe_modules(find_own_modules(compose([shout()])))
    (here / "my_envs" / "words.txt").write_text("other data")
    after = describe_modules(find_own_modules(compose([shout()])))
    assert {name for name in before if before[name] != after[name]} == {"my_envs"}
    assert after["my_envs"]["sha256"] == hash_of(here / "my_envs")


@pytest.fixture
def littered(here: Path) -> Path:
    """my_envs with what editors, links and programs leave in a package."""
    package = here / "my_envs"
    (package / ".#shout.py").symlink_to("me@host.4242:1700000000")  # Emacs' lock: it points nowhere
    (package / "around.py").symlink_to("around.py")
    (package / "parent").symlink_to("..")
    (package / "itself").symlink_to(".")
    (package / "real").mkdir()
    (package / "real" / "more.py").write_text("import late\n")
    (package / "alias").symlink_to("real")
    (here / "late.py").write_text("")
    os.mkfifo(package / "pipe.py")
    return here


LITTERED = {"shout.py", "words.txt", "alias/more.py", "real/more.py"}  # and what lies beside the package, by `parent`


def test_files_that_are_none_are_left_out_and_links_end(littered: Path) -> None:
    package = littered / "my_envs"
    files = {str(file.relative_to(package)) for file in files_of(package)}
    assert {name for name in files if not name.startswith("parent/")} == LITTERED
    assert files - LITTERED == {"parent/far_away.py", "parent/shout_words.py", "parent/unrelated.py", "parent/late.py"}
    assert set(find_own_modules(compose([shout()]))) == {*FOUND, "late"}
    assert len(hash_of(package)) == 64


def test_a_sweep_copies_such_a_package_and_a_checkout_that_an_editor_holds(littered: Path, monkeypatch) -> None:
    checkout = littered / "checkout" / "prl"
    checkout.mkdir(parents=True)
    (checkout / "__init__.py").write_text("")
    (checkout / ".#plan.py").symlink_to("me@host.4242:1700000000")
    monkeypatch.setattr(prl, "__file__", str(checkout / "__init__.py"))
    (littered / "my_envs" / "parent").unlink()
    code = freeze_code(littered / "sweep", [SimpleNamespace(config=compose([shout()]))]).path
    assert {str(file.relative_to(code / "my_envs")) for file in files_of(code / "my_envs")} == LITTERED
    assert [file.name for file in files_of(code / "prl")] == ["__init__.py"]


def test_of_a_package_with_much_data_only_the_code_is_read(here: Path) -> None:
    """A run of its own, which is not copied, may have it: it takes no time, and no memory."""
    package = here / "my_envs"
    with (package / "data.bin").open("wb") as file:
        file.truncate(20_000_000_000)  # a hole: it takes no place
    started = time.monotonic()
    before = hash_of(package)
    assert time.monotonic() - started < 10
    (package / "shout.py").write_text("edited")
    edited = hash_of(package)
    with (package / "data.bin").open("ab") as file:
        file.write(b"more")
    assert len({before, edited, hash_of(package)}) == 3


@pytest.mark.slow
@pytest.mark.parametrize("program", ["module", pytest.param("script", marks=pytest.mark.exhaustive)])
def test_a_local_run_finds_modules_of_the_current_directory_and_its_own_code_before_them(here: Path, program) -> None:
    """Whatever else the directory is called, its processes run the code of their root."""
    (here / "far_away.py").write_text("")
    variables = environment() | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    if program == "script":
        (here / "prl.py").write_text(OTHER_PRL)  # the program itself does not look here
        command = [str(Path(sys.executable).with_name("prl")), "rl"]
    else:
        command = [sys.executable, "-m", "prl.rl"]
    lines = [shout(), *UNEVALUATED[:3], "eval=none", "max_steps=1", "logging=none", f"output_dir={here}/run"]
    done = subprocess.run([*command, *lines], cwd=here, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = json.loads((here / "run/env.json").read_text())["modules"]
    assert {name: recorded[name]["path"] for name in recorded} == {n: str(here / file) for n, file in FOUND.items()}
    assert os.listdir(here / "run/metrics")
