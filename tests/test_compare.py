"""`prl.compare`: budgets, groups, verdicts, states, what it prints and writes. Run directories come from prl itself."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from runs import SMALL, environment, run

from prl.compare.figure import make_curves_of_groups, mean_line
from prl.compare.points import read_directory
from prl.compare.ranking import Comparison, compare
from prl.compare.table import group_table, render_text
from prl.config import compose
from prl.config.errors import UserError
from prl.metrics.writer import MetricsWriter
from prl.planning.planner import make_plan
from prl.runtime.directory.rundir import claim
from prl.runtime.directory.status_file import StatusFile

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


# --- groups -----------------------------------------------------------------------------------------------------------


def test_seeds_are_grouped_ranked_and_told_apart_or_not(tmp_path: Path) -> None:
    for seed, noise in ((1, 0.0), (2, 0.01), (3, -0.01)):
        make_point(tmp_path / f"a{seed}", [0.0, 0.5 + noise], algo="default", seed=seed)
        make_point(tmp_path / f"b{seed}", [0.0, 0.49 + 2 * noise], algo="grpo", seed=seed)
        make_point(tmp_path / f"c{seed}", [0.0, 0.2 + noise], algo="rloo", seed=seed)
    result = compared(tmp_path)
    assert ranks(result) == [(("default",), 1, "best"), (("grpo",), 2, "indistinguishable"), (("rloo",), 3, "worse")]
    best = result.groups[0]
    assert best.mean == pytest.approx(0.5)
    assert best.half_width == pytest.approx(4.302653 * 0.01 / 3**0.5, rel=1e-5)
    text = render_text(result)
    assert "Welch" in text
    assert "Holm" in text


def test_runs_that_differ_in_more_than_the_seed_are_no_group_of_seeds(tmp_path: Path) -> None:
    """Single runs, each with its own seed: the seed tells them apart, and yet says nothing of why they differ."""
    make_point(tmp_path / "a", [0.0, 0.1], others=("seed=1",))
    make_point(tmp_path / "b", [0.0, 0.2], others=("seed=2",))
    make_point(tmp_path / "c", [0.0, 0.3], others=("seed=3", "optim.lr=0.5"))
    make_point(tmp_path / "d", [0.0, 0.9], others=("seed=4", "env=countdown", "algo=sync"))
    result = compared(tmp_path)
    assert result.columns == ["algo", "optim.lr", "env", "seed"]
    assert {group.key: len(group.points) for group in result.groups} == {
        ("default", "0.0015", "reverse_text"): 2,
        ("default", "0.5", "reverse_text"): 1,
        ("sync", "0.0015", "countdown"): 1,
    }


def test_single_runs_show_all_in_which_they_differ(tmp_path: Path) -> None:
    """Although one key would do to tell them apart."""
    make_point(tmp_path / "a", [0.0, 0.1], others=("optim.lr=0.001", "algo.group_size=4", "max_steps=2"))
    make_point(tmp_path / "b", [0.0, 0.2], others=("optim.lr=0.002", "algo.group_size=8", "max_steps=3"))
    result = compared(tmp_path)
    assert set(result.columns) == {"optim.lr", "algo.group_size", "max_steps"}
    make_point(tmp_path / "c", [0.0, 0.2], others=("memory=tight",))
    columns = compared(tmp_path).columns
    assert "memory_recipe" in columns or "memory" in columns
    assert not any(column.startswith("memory_recipe.") for column in columns), "which follow from the choice"


def test_sweeps_show_in_what_they_differ_besides_what_was_swept(tmp_path: Path) -> None:
    for lr in ("0.1", "0.2"):
        make_point(tmp_path / "x" / lr, [0.0, 0.1], optim__lr=lr)
    for lr in ("0.3", "0.4"):
        make_point(
            tmp_path / "y" / lr, [0.0, 0.2], optim__lr=lr, others=("algo.max_off_policy_steps=0", "eval.num_tasks=8")
        )
    assert {"algo.max_off_policy_steps", "eval.num_tasks"} < set(compared(tmp_path).columns)
    assert compared(tmp_path / "y").columns == ["optim.lr"]


def test_what_is_too_much_for_columns_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl.compare.columns.MOST_COLUMNS", 1)
    make_point(tmp_path / "a", [0.0, 0.1], others=("optim.lr=0.001", "algo.group_size=4"))
    make_point(tmp_path / "b", [0.0, 0.2], others=("optim.lr=0.002", "algo.group_size=8"))
    result = compared(tmp_path)
    assert result.columns == ["algo.group_size"]
    assert "optim.lr" in next(note for note in result.notes if "differ" in note)


def test_what_was_swept_is_not_all_that_sets_sweeps_apart(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_point(tmp_path / "x" / str(seed), [0.0, 0.1], algo="grpo", seed=seed)
        make_point(tmp_path / "y" / str(seed), [0.0, 0.2], algo="grpo", seed=seed, others=("optim=adamw",))
    result = compared(tmp_path)
    assert result.columns == ["algo", "optim", "seed"]
    assert sorted(group.key for group in result.groups) == [("grpo", "adamw"), ("grpo", "muon")]


def test_a_key_that_is_the_seed_is_no_column(tmp_path: Path) -> None:
    for seed in (1, 2):
        make_point(tmp_path / str(seed), [0.0, 0.1], others=(f"seed={seed}", "warm_start.seed=${seed}"))
    result = compared(tmp_path)
    assert result.columns == ["seed"]
    assert len(result.groups) == 1


def test_one_seed_has_no_interval_and_no_verdict(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.9], algo="default", seed=1)
    make_point(tmp_path / "b", [0.0, 0.1], algo="grpo", seed=1)
    make_point(tmp_path / "c", [0.0, 0.2], algo="grpo", seed=2)
    result = compared(tmp_path)
    assert result.groups[0].half_width is None
    assert ranks(result)[1] == (("grpo",), 2, "too few seeds")
    assert result.groups[1].p is None


def test_a_lower_loss_is_better(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [3.0, 2.0], job="sft", optim="adamw")
    make_point(tmp_path / "b", [3.0, 1.0], job="sft", optim="sgd")
    result = compared(tmp_path)
    assert result.metric is not None
    assert result.metric.label == "held-out loss"
    assert [key for key, _, _ in ranks(result)] == [("sgd",), ("adamw",)]


def test_without_evaluation_training_rewards_are_ranked_and_it_is_said(tmp_path: Path) -> None:
    for name, reward in (("default", 0.2), ("grpo", 0.6)):
        path = make_point(tmp_path / name, [0.0, reward], algo=name)
        rows = (path / "metrics" / "orchestrator.jsonl").read_text().splitlines(keepends=True)
        (path / "metrics" / "orchestrator.jsonl").write_text("".join(row for row in rows if "eval/" not in row))
    result = compared(tmp_path)
    assert ranks(result)[0][0] == ("grpo",)
    assert result.values["grpo"] == (1, 0.3)
    assert any("weaker claim" in note for note in result.notes)


# --- columns ----------------------------------------------------------------------------------------------------------


def test_only_swept_keys_are_columns_and_seed_is_the_last(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.1], seed=1, memory="tight", optim__lr=0.1)
    make_point(tmp_path / "b", [0.0, 0.1], seed=2, memory="none", optim__lr=0.1)
    assert compared(tmp_path).columns == ["memory", "optim.lr", "seed"]


def test_columns_are_found_where_nothing_says_what_was_swept(tmp_path: Path) -> None:
    """A choice stands for all the keys it sets."""
    for name, swept in {"a": {}, "b": {"memory": "tight"}, "c": {"seed": 3}, "d": {"optim__lr": 0.5}}.items():
        path = make_point(tmp_path / name, [0.0, 0.1], **swept)
        plan = json.loads((path / "plan.json").read_text())
        plan["config"]["swept"] = {}
        (path / "plan.json").write_text(json.dumps(plan))
    result = compared(tmp_path)
    assert result.columns == ["memory_recipe", "optim.lr", "seed"]
    assert {group.key for group in result.groups} == {("none", "0.0015"), ("tight", "0.0015"), ("none", "0.5")}


# --- states -----------------------------------------------------------------------------------------------------------


def test_every_state_is_a_row_and_only_finished_points_are_ranked(tmp_path: Path) -> None:
    make_point(tmp_path / "done", [0.0, 0.1, 0.5], seed=1)
    two = ("max_steps=2",)
    make_point(tmp_path / "failed", [0.0, 0.2], seed=2, state="failed", others=two)
    make_point(tmp_path / "running", [0.0, 0.3, 0.9], seed=3, state="running")
    lost = make_point(tmp_path / "lost", [0.0, 0.3], seed=4, state="running", others=two)
    status = json.loads((lost / "status.json").read_text())
    (lost / "status.json").write_text(json.dumps({**status, "updated": time.time() - 1000}))
    claim(make_plan(compose([f"output_dir={tmp_path / 'frozen'}", "seed=5", *two]))).release()
    points = [{"dir": name, "swept": {"seed": "1"}, "point_id": "x"} for name in ("done", "running", "gone")]
    points[2]["swept"] = {"seed": "6"}
    (tmp_path / "sweep.json").write_text(json.dumps({"points": points}))
    result = compared(tmp_path)
    states = {point.name: point.state for point in result.points}
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
    assert {point.name: point.state for point in result.points} == {"a": "done", "b": "unreadable"}
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
    with pytest.raises(UserError, match="different jobs: rl, sft"):
        compared(tmp_path)


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


def test_runs_that_repeat_a_seed_count_once(tmp_path: Path) -> None:
    """The same two seeds from two sweeps say no more of how far seeds differ than from one."""
    for name in ("one", "other"):
        for seed, reward in ((1, 0.2), (2, 0.6)):
            make_point(tmp_path / name / f"seed-{seed}", [0.0, reward + (name == "other") / 10], seed=seed)
    once = compare("once", read_directory(tmp_path / "one"), "steps").groups[0]
    result = compare("twice", read_directory(tmp_path), "steps")
    (twice,) = result.groups
    assert sorted(twice.values) == pytest.approx([0.25, 0.65])
    assert twice.half_width == pytest.approx(once.half_width)
    assert any("repeat a seed of their group (1, 2) count once" in note for note in result.notes)
    table = group_table(result)
    assert table.rows[0][table.headings.index("seeds")].text == "2"


@pytest.mark.parametrize(("failed", "is_ranked"), [(0, True), (1, True), (12, False)])
def test_evaluations_that_lost_rollouts_say_so(tmp_path: Path, failed: int, is_ranked: bool) -> None:
    make_point(tmp_path / "a", [0.0, 0.5])
    path = make_point(tmp_path / "b", [0.0, 0.5], others=("optim.lr=0.5",))
    counts = {"eval/failed_rollouts": failed, "eval/rollouts": 16}
    MetricsWriter(path, "orchestrator").log(step=1, **{"eval/reward": 0.9}, **counts)
    result = compared(tmp_path)
    assert ("b" in result.ranked) == is_ranked
    told = [note for note in result.notes if note.startswith(f"b: {failed} of 16 rollouts")]
    assert len(told) == (failed > 0)
    assert all(("not ranked" in note) == (not is_ranked) for note in told)


def test_the_policy_before_training_is_not_ranked_among_trained_ones(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.1, 0.2])
    path = make_point(tmp_path / "b", [0.9, 0.1, 0.1, 0.1, 0.1], others=("optim.lr=0.5",))
    file = path / "metrics" / "orchestrator.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    kept = [row for row in rows if "eval/reward" not in row or row["step"] in (0, 4)]
    file.write_text("".join(json.dumps(row) + "\n" for row in kept))
    result = compared(tmp_path)
    assert "b" not in result.values
    assert any(note.startswith("b: it was evaluated before its first step") for note in result.notes)
    assert result.groups[0].points[0].name == "a"
