"""CHAOS_ROUNDS rounds from CHAOS_SEED on (the README of this folder); in CI a slice."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest
from check import check_run
from jobs import LocalJob
from play import play
from rounds import DEPLOYMENTS, KINDS, SMALL, draw
from runs import environment

FIRST = int(os.environ.get("CHAOS_SEED", "0"))
ROUNDS = os.environ.get("CHAOS_ROUNDS")
SLICE = {"local": 10, "slurm": 1, "vllm": 1}  # rounds in CI

pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def reference(tmp_path_factory, cache):
    """The synchronous job, undisturbed."""
    folder = tmp_path_factory.mktemp("reference")
    (synchronous,) = (d for d in DEPLOYMENTS if d.synchronous)
    arguments = [*SMALL, f"cache_dir={cache}", *synchronous.overrides, f"output_dir={folder}/run"]
    assert LocalJob(arguments, folder, environment()).wait() == 0, (folder / "console.log").read_text()
    assert check_run(folder / "run") == []
    return folder / "run"


def rounds_of(kind):
    count = SLICE[kind] if ROUNDS is None else int(ROUNDS)
    return pytest.mark.parametrize(
        "drawn", [draw(seed, kind) for seed in range(FIRST, FIRST + count)], ids=lambda drawn: drawn.name
    )


def hold(drawn, cache, reference, folder):
    told = play(drawn, folder / "round", cache, reference)
    print(told)
    assert not told.problems, f"{told}\n{(folder / 'round/console.log').read_text()[-3000:]}"
    shutil.rmtree(folder / "round")


@rounds_of("local")
def test_round(drawn, cache, reference, tmp_path):
    hold(drawn, cache, reference, tmp_path)


@pytest.mark.slurm
@pytest.mark.usefixtures("slurm")
@rounds_of("slurm")
def test_round_under_slurm(drawn, cache, tmp_path):
    hold(drawn, cache, None, tmp_path)


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@rounds_of("vllm")
def test_round_with_vllm(drawn, cache, tmp_path):
    hold(drawn, cache, None, tmp_path)


def test_a_seed_draws_what_it_drew():
    for kind in KINDS:
        assert [draw(seed, kind) for seed in range(50)] == [draw(seed, kind) for seed in range(50)]
