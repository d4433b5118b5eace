"""What `pytest` without a word runs, on how many cores, and what else there is: its last lines name it."""

from __future__ import annotations

import os

import pytest

TIERS = {  # marker -> what is in it; figures of a 2-core virtual machine
    "slow": "whole runs (pytest -n 2 --dist loadfile -m 'slow and not exhaustive and not slurm and not vllm')",
    "timed": "what asserts how long something takes: by itself, on a machine without other work",
    "slurm": "on a real SLURM, which it brings up and takes down (root, Debian's packages)",
    "vllm": "with vLLM (its environment: prl/inference/README.md)",
    "exhaustive": "combinations of what is tested singly; hours",
}
FIRST = "(not slow or smoke) and not " + " and not ".join(marker for marker in TIERS if marker != "slow")
CORES = 4  # processes share the memory, too
# files of whole runs that take minutes, begun first (--no-loadscope-reorder): no process of pytest ends with one alone
LONGEST = (
    "test_families_parallel",
    "test_runs",
    "test_families_runs",
    "test_bench",
    "test_parallel_equality",
    "test_local_sweep",
    "test_distillation",
    "test_transport_nccl",
    "test_runtime_tree",
)


def choose(config: pytest.Config) -> None:
    """The first tier, for who has named neither tests nor markers."""
    said = config.option.markexpr or config.option.keyword or config.args_source is pytest.Config.ArgsSource.ARGS
    config.stash[IS_FIRST] = not (said or getattr(config.option, "lf", False) or config.option.collectonly)
    if config.stash[IS_FIRST]:
        config.option.markexpr = FIRST
        if getattr(config.option, "numprocesses", 0) is None and not config.option.usepdb:
            config.option.numprocesses = min(os.cpu_count() or 1, CORES)
            if config.option.dist == "no":
                config.option.dist = "loadfile"  # what a fixture of a module starts is started once


def share_cores(config: pytest.Config) -> None:
    """One thread for each of several processes of pytest.

    OpenMP's threads spin while they wait for each other, and a tiny model makes them wait thousands of times a step:
    five steps took 0.5 s of CPU with one thread, and 10 s with two, on two cores with other work.
    """
    if getattr(config.option, "numprocesses", None):
        os.environ.setdefault("OMP_NUM_THREADS", "1")


def longest_first(items: list[pytest.Item]) -> None:
    place = {name: index for index, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


def tell(config: pytest.Config, reporter: pytest.TerminalReporter) -> None:
    if config.stash.get(IS_FIRST, False):
        reporter.section("not among these")
        for marker, what in TIERS.items():
            reporter.write_line(f"pytest -m {marker:<11} {what}")


IS_FIRST = pytest.StashKey[bool]()
