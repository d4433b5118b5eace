"""Publications of weights by many processes, as the benchmark measures them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from prl.bench.publication import check

SMALL = ["--trainers=8", "--ep=4", "--engines=1", "--tp=4", "--layers=8", "--bucket-kib=2048"]


def publication(*arguments: str) -> dict[str, float]:
    command = [sys.executable, "-m", "prl.bench.publication", "--json", *arguments]
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def test_eight_ranks_send_evenly_to_four_processes_and_none_holds_more_than_two_buckets() -> None:
    figures = publication(*SMALL)
    assert figures["laps"] > 2, "a rank has more than it may hold"
    assert figures["an engine process gets, MB"] < figures["version, MB"] / 2, "its part and what all have"
    check(figures)


@pytest.mark.parametrize(
    ("figure", "wrong"),
    [("a rank sends at most, MB", 1.2), ("a rank holds at most, buckets", 2.1)],
)
def test_uneven_ranks_and_hoarders_are_told(figure: str, wrong: float) -> None:
    figures = {
        "a rank sends at least, MB": 1.0,
        "a rank sends at most, MB": 1.05,
        "a rank holds at most, buckets": 1.9,
        "an engine process holds at most, buckets": 0.5,
    }
    check(figures)
    with pytest.raises(AssertionError):
        check(figures | {figure: wrong})


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_235b_goes_from_64_ranks_to_32_processes() -> None:
    check(publication())


@pytest.mark.slow
def test_two_trainers():
    """The fewest, of which one is looked at as the first and one as the last."""
    figures = publication("--trainers=2", "--ep=2", "--engines=1", "--tp=1", "--layers=2")
    assert figures["version, MB"] > 0
    check(figures)


@pytest.mark.parametrize("ways", [1, 2])
def test_a_models_weights_from_one_device_to_another(ways: int) -> None:
    command = [sys.executable, "-m", "prl.bench.publication_gpus", "--device=cpu", "--model=tiny_qwen3_moe"]
    done = subprocess.run([*command, f"--tp={ways}"], capture_output=True, check=True, text=True)
    assert "seconds, median of the others" in done.stdout


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_no_rank_has_more_than_its_part_in_host_memory(transport: str) -> None:
    command = [sys.executable, "-m", "prl.bench.publication_host", f"--transport={transport}", "--mib=512", "--ranks=4"]
    told = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    (line,) = [line for line in told.splitlines() if line.startswith("most memory of a rank")]
    assert 0.1 < float(line.split()[-1]) < 0.2, "a quarter of half a GiB, and what is checked meanwhile"
