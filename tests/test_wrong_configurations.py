"""Every wrong configuration is refused in the user's words before anything exists, with remedies that work as typed."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
from wrong_configurations import INFERENCE, RL, SFT

from prl.config import ConfigError, UserError, compose

ROOT = Path(__file__).parent.parent
TABLE = [
    (job, line, told)
    for job, lines in (("rl", RL), ("sft", SFT), ("inference", INFERENCE))
    for line, told in lines.items()
]


def words(line):
    """As a shell would, but for quotes, which Hydra reads."""
    return ["inference.host='two words'"] if "two words" in line else line.split()


def key_of(override):
    key = override.partition("=")[0].lstrip("+~")
    return "memory_recipe" if key == "memory" else key


def remedied(overrides, remedy):
    """The command line with the remedy typed in place of what it says otherwise."""
    said = {key_of(override) for override in remedy}
    return [override for override in overrides if key_of(override) not in said] + list(remedy)


def refused(overrides, job) -> list[UserError]:
    with pytest.raises(ConfigError) as caught:
        compose(overrides, job)
    return caught.value.violations


def test_there_are_more_than_120():
    assert len(TABLE) >= 120


@pytest.mark.parametrize(("job", "line", "told"), TABLE, ids=[f"{job} {line}" for job, line, _ in TABLE])
def test_a_wrong_configuration_is_refused_with_a_remedy_that_works(tmp_path, monkeypatch, job, line, told):
    monkeypatch.chdir(tmp_path)
    found = refused(words(line), job)
    assert told in "\n".join(violation.render() for violation in found), [v.render() for v in found]
    assert all(violation.remedies for violation in found), [v.fix for v in found]
    first = list(itertools.chain.from_iterable(violation.remedies[0] for violation in found))
    compose(remedied(words(line), first), job)
    if len(found) == 1:
        for remedy in found[0].remedies[1:]:
            compose(remedied(words(line), remedy), job)
    assert list(tmp_path.iterdir()) == []


# what only the machine can tell, and what only a sweep can have wrong, as processes
AT_START = {
    "host": (["inference.host=not.a.host"], "inference.host=127.0.0.1"),
    "cache": (["cache_dir=/proc/x"], "cache_dir=~/.cache/prl"),
    "tokenizer": (["model.tokenizer=/nowhere/tokenizer"], "model.tokenizer=byte"),
    "output_dir": (["output_dir=/proc/x"], "output_dir"),
    "sweep directory": (["-m", "hydra.sweep.dir=/proc/x", "seed=1,2"], "hydra.sweep.dir=outputs/sweeps/mine"),
    "launcher": (["-m", "hydra.launcher.parallel_points=0", "seed=1,2"], "hydra.launcher.parallel_points=auto"),
    "no cluster": (["-m", "hydra/launcher=slurm", "seed=1,2"], "hydra/launcher=local"),
    "port": (["inference.port=70000"], "inference.port=0"),
    "a point of a grid": (["-m", "parallelism.ep=1,16"], "parallelism.ep=8"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", AT_START)
def test_the_documented_command_refuses_and_leaves_nothing(tmp_path, name):
    args, told = AT_START[name]
    hidden = {"PATH": os.path.dirname(sys.executable)} if name == "no cluster" else {}
    done = subprocess.run(
        [sys.executable, "-m", "prl.rl", *args],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), **hidden},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert told in done.stderr, done.stderr
    assert list(tmp_path.iterdir()) == []
