"""Evaluations are all there, once each, wherever a run or a part of it was killed."""

from __future__ import annotations

import json
import time

import pytest
from runs import SMALL, Moment, finish, kill_for_sure, kill_root, rows, run, series, start, wait_until_gone

pytestmark = pytest.mark.slow

SYNC = ["algo.max_off_policy_steps=0"]
CASES = {  # moment, settings, what the run evaluates
    "final evaluation, which is due": ("evaluation:3", [*SYNC, "eval.interval=2"], [0, 2, 4]),
    "final evaluation, by eval.at_end": ("evaluation:2", [*SYNC, "eval.interval=9"], [0, 4]),
    "one of the middle": ("evaluation:2", [*SYNC, "eval.interval=2"], [0, 2, 4]),
    "behind one of the middle": ("evaluated:2", [*SYNC, "eval.interval=2"], [0, 2, 4]),
    "while the trainer goes on": ("evaluation:2", ["eval.interval=2"], [0, 2, 4]),
}
FIRST = ("final evaluation, which is due", "one of the middle")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return f"cache_dir={tmp_path_factory.mktemp('cache')}"


@pytest.mark.parametrize("case", [pytest.param(x, marks=() if x in FIRST else pytest.mark.exhaustive) for x in CASES])
def test_a_killed_run_makes_up_for_its_evaluation(case, cache, tmp_path):
    name, settings, expected = CASES[case]
    run_dir, moment = tmp_path / "run", Moment(name, tmp_path / "moment")
    args = [*SMALL, cache, *settings, "max_steps=4", "ckpt.interval=1", f"output_dir={run_dir}"]
    process = start(args, tmp_path, env=moment.env)
    moment.wait(process)
    time.sleep(3)  # what can be committed is
    kill_root(process)
    wait_until_gone(run_dir)
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    assert [row["step"] for row in rows(run_dir, "orchestrator") if "eval/reward" in row] == expected


# --- a part of the run dies in an evaluation --------------------------------------------------------------------------

STEPS = 4
MIDDLE = "rollout of an evaluation:12"  # of 8 tasks: in the second evaluation


def kill_in_evaluation(role, args, tmp_path):
    run_dir, moment = tmp_path / "run", Moment(MIDDLE, tmp_path / "moment")
    args = [*SMALL, *args, f"max_steps={STEPS}", "algo.batch_size=8", f"output_dir={run_dir}"]
    process = start(args, tmp_path, env=moment.env)
    moment.wait(process)
    kill_for_sure(json.loads((run_dir / "status.json").read_text())["roles"][role]["pid"])
    moment.go()
    return run_dir, args, finish(process)


def evaluated(run_dir):
    """Step -> failed rollouts."""
    return [
        (row["step"], row["eval/failed_rollouts"])
        for row in sorted(rows(run_dir, "orchestrator"), key=lambda row: row["step"])
        if "eval/reward" in row
    ]


def test_a_killed_environment_changes_neither_evaluation_nor_training(cache, tmp_path):
    args = [cache, *SYNC, "eval.interval=2"]
    run_dir, _, done = kill_in_evaluation("env/reverse_text", args, tmp_path)
    assert done.code == 0, done.output
    assert "env/reverse_text ended" in done.output
    plain = run([*SMALL, *args, f"max_steps={STEPS}", "algo.batch_size=8", f"output_dir={tmp_path}/plain"], tmp_path)
    assert plain.code == 0, plain.output
    for role in ("trainer.0", "orchestrator"):
        told, expected = (
            [{key: value for key, value in row.items() if key != "retried_rollouts"} for row in series(where, role)]
            for where in (run_dir, tmp_path / "plain")
        )
        assert told == expected


def test_a_killed_engine_costs_no_evaluation_of_the_middle(cache, tmp_path):
    run_dir, _, done = kill_in_evaluation("inference/0", [cache, "eval.interval=1"], tmp_path)
    assert done.code == 0, done.output
    assert evaluated(run_dir) == [(step, 0) for step in range(STEPS + 1)]


def test_an_engine_killed_when_nobody_has_weights_for_it_ends_the_run_and_its_evaluation_is_made_up_for(
    cache, tmp_path
):
    args = [cache, "eval.interval=9", "ckpt.interval=1", "weight_transport=tcp"]
    run_dir, args, done = kill_in_evaluation("inference/0", args, tmp_path)
    assert done.code == 1, done.output
    assert "no engine has weights" in done.output
    assert json.loads((run_dir / "status.json").read_text())["state"] == "failed"
    done = run(args, tmp_path)
    assert done.code == 0, done.output
    assert evaluated(run_dir) == [(0, 0), (STEPS, 0)]
