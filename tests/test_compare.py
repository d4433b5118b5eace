"""`prl.compare`: budgets, groups, verdicts, states, what it prints and writes. Run directories come from prl itself."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, environment, run

import prl.status
from prl.compare.__main__ import _write
from prl.compare.figure import make_curves_of_groups, mean_line
from prl.compare.points import read_directory
from prl.compare.ranking import Comparison, compare
from prl.compare.table import render_text
from prl.config import compose
from prl.config.errors import UserError
from prl.metrics.writer import MetricsWriter
from prl.planning.planner import make_plan
from prl.runtime.directory.rundir import LOCK, claim
from prl.runtime.directory.status_file import StatusFile


@contextlib.contextmanager
def living(path: Path) -> Iterator[None]:
    """As if the run of this directory lived: it holds its lock."""
    with (path / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


FAILURE = {"class": "oom", "role": "trainer/0", "message": "CUDA out of memory"}


def make_point(
    path: Path,
    rewards: list[float],
    *,
    job: str = "rl",
    tokens: int = 100,
    state: str = "done",
    others: tuple[str, ...] = (),
    **swept: Any,
) -> Path:
    """A run directory with an evaluation after every step, the first at step 0; one second a step on 2 devices.

    others: overrides that are not called swept.
    """
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in swept.items()]
    steps = max(len(rewards) - 1, 1)
    config = compose([*overrides, f"max_steps={steps}", *others, f"output_dir={path}"], job)
    named = {key.replace("__", "."): str(value) for key, value in swept.items()}
    plan = make_plan(config.model_copy(update={"swept": named}))
    claim(plan).release()
    trainer, orchestrator = MetricsWriter(path, "trainer/0"), MetricsWriter(path, "orchestrator")
    for step, reward in enumerate(rewards):
        if step:
            values = {"tokens": tokens, "step_s": 1.0, "mfu": 0.25, "peak_memory_bytes": 2**30, "mismatch_kl_mean": 0.1}
            trainer.log(step=step, **values, loss=3 - reward)
            orchestrator.log(step=step, reward=reward / 2, staleness_mean=1.5)
        if job == "rl":
            orchestrator.log(step=step, **{"eval/reward": reward})
        else:
            trainer.log(step=step, val_loss=reward)
    status = StatusFile(path, plan.point_id, job, config.name, config.max_steps)
    failure = FAILURE if state == "failed" else None
    status.update(state=state, step=len(rewards) - 1, failure=failure)
    status.write()
    return path


def compared(directory: Path, axis: Any = "steps") -> Comparison:
    return compare(directory.name, read_directory(directory), axis)


def ranks(comparison: Comparison) -> list[tuple[tuple[str, ...], int | None, str]]:
    return [(group.key, group.rank, group.verdict) for group in comparison.groups]


# --- budget -----------------------------------------------------------------------------------------------------------


def test_points_are_compared_at_the_largest_budget_that_all_reached(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.1, 0.2, 0.9], algo="default")
    make_point(tmp_path / "b", [0.0, 0.3, 0.4], algo="grpo")
    at_steps = compared(tmp_path)
    assert at_steps.budget == 2
    assert at_steps.values == {"a": (2, 0.2), "b": (2, 0.4)}
    assert ranks(at_steps)[0][0] == ("grpo",)


def test_a_value_is_the_last_at_or_before_the_budget_and_never_between_two(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.1, 0.2], tokens=100, algo="default")
    make_point(tmp_path / "b", [0.0, 0.3, 0.8], tokens=150, algo="grpo")
    at_tokens = compared(tmp_path, "tokens")
    assert at_tokens.budget == 200
    assert at_tokens.values == {"a": (200, 0.2), "b": (150, 0.3)}
    assert "200 tokens trained on" in at_tokens.notes[0]
    assert "from 75% of it" in at_tokens.notes[0]


def test_gpu_hours_count_the_devices_of_trainer_and_engines(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.1, 0.2, 0.3], deployment="colocated")
    make_point(tmp_path / "b", [0.0, 0.1, 0.2, 0.3], deployment="disaggregated")
    at_hours = compared(tmp_path, "gpu_hours")
    assert at_hours.budget == pytest.approx(3 / 3600)
    assert [value for _, value in at_hours.values.values()] == [0.3, 0.1]
    figures = {point.name: point.curves.figures for point in at_hours.points if point.curves}
    assert figures["a"]["tokens_per_s"] == figures["b"]["tokens_per_s"] == pytest.approx(100)
    assert figures["b"]["tokens_per_s_per_gpu"] == pytest.approx(50)
    assert figures["b"]["peak_memory_gib"] == 1.0


# --- states -----------------------------------------------------------------------------------------------------------


def test_every_state_is_a_row_and_only_finished_points_are_ranked(tmp_path: Path) -> None:
    make_point(tmp_path / "done", [0.0, 0.1, 0.5], seed=1)
    two = ("max_steps=2",)
    make_point(tmp_path / "failed", [0.0, 0.2], seed=2, state="failed", others=two)
    make_point(tmp_path / "running", [0.0, 0.3, 0.9], seed=3, state="running")
    make_point(tmp_path / "lost", [0.0, 0.3], seed=4, state="running", others=two)
    claim(make_plan(compose([f"output_dir={tmp_path / 'frozen'}", "seed=5", *two]))).release()
    points = [{"dir": name, "swept": {"seed": "1"}, "point_id": "x"} for name in ("done", "running", "gone")]
    points[2]["swept"] = {"seed": "6"}
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    with living(tmp_path / "running"):
        result = compared(tmp_path)
        shown = {line.split()[0]: line for line in prl.status.render(tmp_path)[0].splitlines()}
    states = {point.name: point.state for point in result.points}
    told = {name: line for name, line in shown.items() if name in states}
    assert set(told) == set(states) - {"frozen"}  # of no sweep's record, and has not begun
    assert all(line.split("  ", 1)[1].strip().startswith(states[name]) for name, line in told.items()), "prl.status"
    assert states == {
        "done": "done",
        "failed": "failed",
        "running": "running",
        "lost": "lost",
        "frozen": "not started",
        "gone": "missing",
    }
    assert next(iter(states)) == "done"
    assert result.ranked == {"done"}
    assert result.values == {"done": (2, 0.5), "running": (2, 0.9)}
    text = render_text(result)
    assert "6 points (1 done, 1 failed, 1 lost, 1 missing, 1 not started, 1 running)" in text
    assert re.search(r"2  failed +1/2 .* oom: trainer/0: CUDA out of memory", text)
    assert re.search(r"\n +6  missing", text)


def test_the_mean_line_is_that_of_the_ranked_points(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.2, 0.4], seed=1)
    make_point(tmp_path / "b", [0.0, 0.4, 0.6], seed=2)
    make_point(tmp_path / "c", [0.0, 0.9], seed=3, state="failed", others=("max_steps=2",))
    (curve,) = make_curves_of_groups(compared(tmp_path), "steps")
    assert len(curve.seeds) == 3
    assert curve.mean == [(0, 0.0), (1, pytest.approx(0.3)), (2, pytest.approx(0.5))]


def test_a_mean_over_unlike_budgets_takes_each_ones_last_value() -> None:
    assert mean_line([[(0, 0.0), (100, 1.0), (200, 2.0)], [(0, 0.0), (150, 1.0)]]) == [
        (0, 0.0),
        (100, 0.5),
        (150, 1.0),
    ]


def test_while_nothing_has_finished_what_runs_is_ranked_and_it_is_said(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.3], algo="default", state="running")
    make_point(tmp_path / "b", [0.0, 0.4, 0.5], algo="grpo", state="running")
    result = compared(tmp_path)
    assert result.values == {"a": (1, 0.3), "b": (1, 0.4)}
    assert any("No point has finished yet" in note for note in result.notes)


def test_nothing_but_frozen_plans_is_a_table_too(tmp_path: Path) -> None:
    claim(make_plan(compose([f"output_dir={tmp_path / 'frozen'}"]))).release()
    text = render_text(compared(tmp_path))
    assert "not started" in text
    assert "No point has a value to rank by." in text


def test_torn_lines_and_damaged_files_cost_rows_and_no_more(tmp_path: Path) -> None:
    path = make_point(tmp_path / "a", [0.0, 0.1, 0.2], seed=1)
    make_point(tmp_path / "b", [0.0, 0.1, 0.2], seed=2)
    with open(path / "metrics" / "orchestrator.jsonl", "a") as file:
        file.write('{"step": 3, "eval/rew')
    with open(path / "metrics" / "trainer.0.jsonl", "a") as file:
        file.write('\x00\x00garbage\n{"step": 2, "mfu": "nan"}\n')
    (tmp_path / "b" / "status.json").write_text("{")
    (tmp_path / "sweep.json").write_text("[]")
    result = compared(tmp_path)
    assert result.values["a"] == (2, 0.2)
    assert {point.name: point.state for point in result.points} == {"a": "unreadable", "b": "unreadable"}
    (damaged,) = (point for point in result.points if point.name == "b")
    assert str(tmp_path / "b" / "status.json") in damaged.why


# --- files and the command --------------------------------------------------------------------------------------------


def command(*args: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB")}
    environment |= {"HOME": str(cwd), **(env or {})}
    return subprocess.run(
        [sys.executable, "-m", "prl.compare", *args],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_csv_json_png_and_one_html_page_that_needs_nothing_else(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for seed in (1, 2):
        make_point(sweep / f"a{seed}", [0.0, 0.5 + seed / 100], algo="default", seed=seed)
        make_point(sweep / f"b{seed}", [0.0, 0.1], algo="grpo", seed=seed, state="failed" if seed == 2 else "done")
    done = command("sweep", "--csv", "o.csv", "--json", "o.json", "--html", "o.html", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (sweep / "compare.png").read_bytes()[:4] == b"\x89PNG"
    lines = list(csv.DictReader((tmp_path / "o.csv").open()))
    assert [(line["point"], line["algo"], line["state"], line["value"]) for line in lines] == [
        ("a2", "default", "done", "0.52"),
        ("a1", "default", "done", "0.51"),
        ("b1", "grpo", "done", "0.1"),
        ("b2", "grpo", "failed", "0.1"),
    ]
    document = json.loads((tmp_path / "o.json").read_text())
    assert document["groups"][0]["swept"] == {"algo": "default"}
    assert document["groups"][0]["mean"] == pytest.approx(0.515)
    page = (tmp_path / "o.html").read_text()
    assert not re.search(r"https?://|src=|@import|url\(", page)
    assert page.count("<svg data-axis=") == 3
    assert page.count("<tr data-group=") == 2 + 4
    assert "oom: trainer/0: CUDA out of memory" in page


def test_what_a_run_says_is_text_on_the_page(tmp_path: Path) -> None:
    path = make_point(tmp_path / "s" / "a", [0.0, 0.1], seed=1, state="failed")
    status = json.loads((path / "status.json").read_text())
    status["failure"]["message"] = "<script>alert(1)</script>"
    (path / "status.json").write_text(json.dumps(status))
    assert command("s", "--html", "o.html", cwd=tmp_path).returncode == 0
    assert "<script>alert" not in (tmp_path / "o.html").read_text()


@pytest.mark.parametrize(
    ("args", "said"),
    [(["nowhere"], "neither WANDB_API_KEY nor ~/.netrc holds a key"), (["empty"], "there is no run in empty")],
    ids=["absent", "empty"],
)
def test_mistakes_exit_with_2_and_a_way_out(tmp_path: Path, args: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    done = command(*args, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_jobs_are_not_mixed(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.1])
    make_point(tmp_path / "b", [3.0, 1.0], job="sft")
    with pytest.raises(UserError, match="different jobs: rl, sft") as refused:
        compared(tmp_path)
    assert refused.value.why == "a reward and a loss cannot be ranked together"
    points = read_directory(tmp_path)
    points[1].job = "eval"
    with pytest.raises(UserError, match="different jobs: eval, rl") as refused:
        compare("t", points, "steps")
    assert "an evaluation spends no budget of training" in str(refused.value.why), "and both are rewards"


@pytest.mark.slow
def test_64_points_of_1000_rows_take_under_3_seconds_and_no_torch(tmp_path: Path) -> None:
    first = make_point(tmp_path / "s" / "p0", [0.0, 0.5], seed=0, memory="none")
    for index in range(64):
        path = first if index == 0 else tmp_path / "s" / f"p{index}"
        path.mkdir(exist_ok=True)
        plan = json.loads((first / "plan.json").read_text())
        plan["config"]["swept"] = {"memory": str(index // 8), "seed": str(index % 8)}
        for name, text in (("plan.json", json.dumps(plan)), ("status.json", (first / "status.json").read_text())):
            (path / name).write_text(text)
        write_long_metrics(path)
    code = (
        "import sys, time\n"
        "sys.argv = ['compare', 's', '--html', 'o.html']\n"
        "from prl.compare.__main__ import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print('SECONDS', time.process_time(), [m for m in ('torch', 'wandb', 'hydra') if m in sys.modules])"
    )
    seconds = []  # of one core, start-up included: by the clock, other tests on the same cores would count as well
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
        taken, _, modules = done.stdout.rpartition("SECONDS ")[2].partition(" ")
        assert modules.strip() == "[]"
        seconds.append(float(taken))
    assert min(seconds) < 6  # seconds of CPU; 2.0 to 2.6 on an idle laptop core
    assert "64 points (64 done)" in done.stdout


def write_long_metrics(path: Path) -> None:
    """1,000 steps with the keys, and so the length, of real rows."""
    trainer = {"time": 1.8e9, "role": "trainer/0", "lr": 0.001, "loss": 1e-3, "mfu_formula": "x" * 150, "entropy": 0.1}
    trainer |= {f"key_{i}": 0.123456789012345 + i for i in range(14)} | {"tokens": 7686, "step_s": 0.5, "mfu": 0.3}
    rollouts = {f"key_{i}": 0.123456789012345 + i for i in range(16)} | {"reward": 0.5, "staleness_mean": 1.0}
    (path / "metrics").mkdir(exist_ok=True)
    with open(path / "metrics" / "trainer.0.jsonl", "w") as file:
        file.writelines(json.dumps({"step": step, **trainer}) + "\n" for step in range(1, 1001))
    with open(path / "metrics" / "orchestrator.jsonl", "w") as file:
        for step in range(1, 1001):
            file.write(json.dumps({"step": step, **rollouts}) + "\n")
            if step % 10 == 0:
                file.write(json.dumps({"step": step, "eval/reward": step / 1000}) + "\n")


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_real_sweep_of_two_seeds(tmp_path: Path) -> None:
    args = ["-m", "+sweep=seeds", "sweep=pair", "seed=1,2", "max_steps=3", "eval.interval=1", "hydra/launcher=local"]
    done = run([*args, *SMALL, f"cache_dir={tmp_path}/cache"], tmp_path)
    assert done.code == 0, done.output
    result = compared(tmp_path / "outputs" / "sweeps" / "pair")
    assert result.columns == ["seed"]
    assert {point.state for point in result.points} == {"done"}
    (group,) = result.groups
    assert len(group.values) == 2
    assert group.half_width is not None
    assert result.budget == 3
    for point in result.points:
        assert point.curves is not None
        assert [step for step, _ in point.curves.held_out] == [0, 1, 2, 3]
        assert set(point.curves.figures) >= {"tokens_per_s", "tokens_per_s_per_gpu", "mfu", "peak_memory_gib"}
        assert set(point.curves.figures) >= {"mismatch_kl", "staleness", "wall_s", "gpu_hours"}
    shown = command("outputs/sweeps/pair", "--at", "tokens", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "pair: 2 points (2 done)" in shown.stdout


@pytest.mark.parametrize("size", [0, 50])
def test_a_point_whose_metrics_were_cut_is_named_and_drags_nobody_down(tmp_path: Path, size: int) -> None:
    for name in ("a", "b", "c"):
        make_point(tmp_path / name, [0.0, 0.5, 0.6], state="done", seed=ord(name))
    whole = compared(tmp_path).budget
    metrics = tmp_path / "a/metrics/trainer.0.jsonl"
    status = json.loads((tmp_path / "a/status.json").read_text())
    assert status["step"] > 0
    with metrics.open("r+b") as file:
        file.truncate(size)
    result = compared(tmp_path)
    assert result.budget == whole
    (cut,) = [point for point in result.points if point.name == "a"]
    assert cut.state == "unreadable"
    assert f"ends at step 0, and status.json says that step {status['step']} was reached" in cut.why


def test_a_table_may_go_to_the_console(tmp_path: Path) -> None:
    make_point(tmp_path / "s" / "one", [0.0, 0.5], seed=1)
    words = [sys.executable, "-m", "prl.compare", "s", "--csv", "-"]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    (row,) = [line for line in done.stdout.splitlines() if line.startswith("one,")]
    assert row.split(",")[2:4] == ["1", "done"]
    assert not (tmp_path / "-").exists()


def test_a_disk_that_is_full_costs_no_table_that_was_there(tmp_path: Path, monkeypatch) -> None:
    """And the place is named, which the system's own error does not do."""
    path = tmp_path / "table.csv"
    _write(path, "old")
    with pytest.raises(UserError, match="cannot write /dev/full: No space left"):
        _write(Path("/dev/full"), "new")

    def full(source: Any, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(UserError, match=f"cannot write {path}") as refused:
        _write(path, "new")
    assert "free space" in refused.value.fix
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
