"""Warm starts in the process tree: made once, by whom, and by whom if that one dies."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from runtime_tree import Start, start, wait_for

from prl.config import compose
from prl.models.checkpoints.sources import random_checkpoint
from prl.runtime.directory.status_file import read_status

__all__ = ["start"]  # the fixture


@pytest.mark.slow
def test_the_warm_start_is_made_once(start: Start) -> None:
    overrides = ("warm_start=reverse_text", "warm_start.max_steps=3")
    code, output = start(*overrides, name="first").wait()
    assert code == 0, output
    assert "[warm start] step 3/3" in output
    root = start(*overrides, name="second")
    code, output = root.wait()
    assert code == 0, output
    assert "warm start: cached, skipped" in output
    assert not (root.run_dir / "warm_start").exists()
    [cached] = (root.run_dir.parent / "cache" / "warm_start").glob("*/weights")
    made = cached.read_text()
    assert made.startswith("made by")
    cached.write_text(made[:-1] + "?")
    code, output = start(*overrides, name="third").wait()
    assert code == 0, output
    assert f"warm start: damaged in the cache, made again ({cached} has another checksum" in output
    assert "[warm start] step 3/3" in output
    assert cached.read_text().startswith("made by")
    assert not cached.read_text().endswith("?")


@pytest.mark.slow
def test_random_weights_are_looked_at_by_who_begins_with_them(start: Start, tmp_path: Path) -> None:
    root = start(name="first")
    assert root.wait()[0] == 0
    model = compose([]).model
    weights = random_checkpoint(model, root.run_dir.parent / "cache") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    code, output = start(name="second").wait()
    assert code == 0, output
    assert f"random weights: damaged in the cache, made again ({weights} has" in output
    assert not weights.exists(), "roles that read none make none"


@pytest.mark.slow
def test_runs_of_several_seeds_make_one_warm_start_together(start: Start) -> None:
    overrides = ("warm_start=reverse_text", "warm_start.max_steps=30")
    roots = [start(*overrides, f"seed={seed}", name=f"seed-{seed}") for seed in (1, 2)]
    outputs = [root.wait() for root in roots]
    assert [code for code, _ in outputs] == [0, 0]
    assert sum("[warm start] step" in output for _, output in outputs) == 1
    assert [
        path.name for path in (roots[0].run_dir.parent / "cache" / "warm_start").iterdir() if "." in path.name
    ] == []


@pytest.mark.slow
def test_who_waits_for_a_warm_start_makes_it_when_its_maker_is_killed(start: Start, tmp_path: Path) -> None:
    overrides = ("warm_start=reverse_text", "warm_start.max_steps=2")
    console = tmp_path / "console"
    first = start(*overrides, "seed=1", name="first", script={"trainer/0": {"step_s": 600}})
    wait_for(lambda: read_status(first.run_dir / "warm_start").get("state") == "running")
    assert read_status(first.run_dir)["doing"] == "warm start"
    with console.open("w") as file:
        second = start(*overrides, "seed=2", name="second", stdout=file.fileno())
    wait_for(lambda: f"process {first.process.pid} on {platform.node()} is making it; waiting" in console.read_text())
    assert not (second.run_dir / "warm_start").exists()
    wait_for(lambda: read_status(second.run_dir)["doing"] == "waits for another run's warm start")
    first.process.kill()
    assert second.wait()[0] == 0, console.read_text()
    assert "[warm start] step 2/2" in console.read_text()
    assert read_status(second.run_dir)["doing"] == ""
