"""Which points are one group, which keys tell groups apart, and which points are ranked."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from test_compare import compared, make_point, ranks

from prl.compare.points import read_directory
from prl.compare.ranking import compare
from prl.compare.table import group_table, render_csv, render_text
from prl.metrics.writer import MetricsWriter

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


@pytest.mark.parametrize(("failed", "is_ranked"), [(0, True), (1, True), (12, False), (16, False)])
def test_evaluations_that_lost_rollouts_say_so(tmp_path: Path, failed: int, is_ranked: bool) -> None:
    make_point(tmp_path / "a", [0.0, 0.5])
    path = make_point(tmp_path / "b", [0.0, 0.5], others=("optim.lr=0.5",))
    counts = {"eval/failed_rollouts": failed, "eval/outcome/ok": 16 - failed, "eval/outcome/environment": failed}
    reward = 0.9 if failed < 16 else None
    MetricsWriter(path, "orchestrator").log(step=1, **{"eval/reward": reward}, **counts)
    result = compared(tmp_path)
    assert ("b" in result.ranked) == is_ranked
    told = [note for note in result.notes if note.startswith(f"b: {failed} of 16 rollouts")]
    assert len(told) == (failed > 0)
    assert all(("not ranked" in note) == (not is_ranked) for note in told)
    (row,) = [row for row in csv.DictReader(io.StringIO(render_csv(result))) if row["point"] == "b"]
    assert (row["failed_rollouts"], row["evaluated_rollouts"]) == ((str(failed), "16") if failed else ("", ""))


def test_the_evaluation_at_the_budget_is_the_one_that_counts(tmp_path: Path) -> None:
    make_point(tmp_path / "a", [0.0, 0.5])
    path = make_point(tmp_path / "b", [0.0, 0.5, 0.6], others=("optim.lr=0.5",))
    counts = {"eval/failed_rollouts": 8, "eval/outcome/ok": 8, "eval/outcome/environment": 8}
    MetricsWriter(path, "orchestrator").log(step=1, **{"eval/reward": 0.9}, **counts)
    file = path / "metrics" / "orchestrator.jsonl"
    rows = sorted(map(json.loads, file.read_text().splitlines()), key=lambda row: row["step"])
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = compared(tmp_path)
    assert set(result.values) == {"a"}
    told = "b: 8 of 16 rollouts of its evaluation there failed and count for nothing; it is not ranked."
    assert told in result.notes


@pytest.mark.parametrize(("cut", "told"), [(1, False), (20, True)])
def test_a_cut_row_of_a_finished_run_is_no_silent_change_of_ranks(tmp_path: Path, cut: int, told: bool) -> None:
    make_point(tmp_path / "a", [0.0, 0.5])
    path = make_point(tmp_path / "b", [0.0, 0.1, 0.9], others=("optim.lr=0.5",))
    file = path / "metrics" / "orchestrator.jsonl"
    before = ranks(compared(tmp_path))
    file.write_bytes(file.read_bytes()[:-cut])
    result = compared(tmp_path)
    (point,) = [point for point in result.points if point.name == "b"]
    assert (point.state == "unreadable") == told
    assert told == (f"{file} was cut: its last line is no whole row" in point.why)
    assert told or ranks(result) == before


def test_code_that_changed_between_seeds_makes_other_groups(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        path = make_point(tmp_path / f"s{seed}", [0.0, 0.5], seed=seed)
        record = json.loads((path / "env.json").read_text())
        record["modules"] = {"my_envs": {"path": "/x/my_envs.py", "sha256": "old" if seed < 3 else "new"}}
        record["later"] = [{"attempt": 2, "code": {"prl": {"sha256": "other"}}}] if seed == 2 else []
        (path / "env.json").write_text(json.dumps(record))
    result = compared(tmp_path)
    assert result.columns == ["modules", "seed"]
    assert sorted(len(group.points) for group in result.groups) == [1, 2]
    (told,) = [note for note in result.notes if note.startswith("Not all ran the same code of prl")]
    assert told.endswith(": s2.") or ": s2; " in told
    path = tmp_path / "s3/env.json"
    path.write_text((tmp_path / "s1/env.json").read_text())
    (tmp_path / "s2/env.json").write_text(json.dumps({}))
    same = compared(tmp_path)
    assert same.columns == ["seed"]
    assert len(same.groups) == 1
    assert not any("code of prl" in note for note in same.notes)


@pytest.mark.parametrize("other", ["eval.num_tasks=4", "env.mix.reverse_text.args.max_chars=12", "env=countdown"])
def test_values_of_other_tasks_are_not_better_or_worse(tmp_path: Path, other: str) -> None:
    for seed in (1, 2):
        make_point(tmp_path / f"a{seed}", [0.0, 0.5 + seed / 100], seed=seed)
        make_point(tmp_path / f"b{seed}", [0.0, 0.4 + seed / 100], seed=seed, others=("optim.lr=0.5",))
        make_point(tmp_path / f"c{seed}", [0.0, 0.9 + seed / 100], seed=seed, others=(other,))
    result = compared(tmp_path)
    found = {group.points[0].name[0]: (group.rank, group.verdict) for group in result.groups}
    assert found == {"a": (1, "best"), "b": (2, "worse"), "c": (1, "")}
    assert any(note.startswith("Their tasks differ") for note in result.notes)
    assert render_text(result)


def test_a_seed_that_was_never_begun_is_no_other_task(tmp_path: Path) -> None:
    """Of it the sweep's record alone tells, without a configuration."""
    listed = []
    for rate, value in (("0.1", 0.5), ("0.2", 0.4)):
        swept = {"optim.lr": rate, "seed": "2"}
        path = make_point(tmp_path / f"x{rate}", [0.0, value], seed=2, optim__lr=rate)
        listed.append({"dir": path.name, "point_id": rate, "swept": swept})
    listed.insert(0, {"dir": "never", "point_id": "p", "swept": {"optim.lr": "0.1", "seed": "1"}})
    (tmp_path / "sweep.json").write_text(json.dumps({"points": listed}))
    result = compared(tmp_path)
    assert [group.rank for group in result.groups if group.values] == [1, 2]
    assert [len(group.points) for group in result.groups] == [2, 1]
    assert not any(note.startswith("Their tasks differ") for note in result.notes)


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
