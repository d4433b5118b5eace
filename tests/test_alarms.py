"""Alarms: from rows of metrics, from planted faults, and where they are told."""

from __future__ import annotations

import contextlib
import json
import math

import planted
import pytest
import torch
from runs import rows
from torch import nn

from prl.config import compose
from prl.metrics.alarms import LOOKS, REMEDIES, Alarms
from prl.metrics.writer import MetricsWriter
from prl.planning.planner import make_plan
from prl.runtime.directory.status_file import EMPTY
from prl.runtime.people.view import RunView
from prl.status import render_run
from prl.trainer.loops.guard import SAMPLED, sample_weights

WINDOW = 4
HEALTHY = {
    "trainer": {
        "entropy": 1.0,
        "mismatch_kl_mean": 0.01,
        "mismatch_kl_p999": 1.0,
        "step_skipped": 0,
        "weights_changed": 1.0,
        "wait_for_batch_s": 0.1,
        "step_s": 1.0,
    },
    "overlap": {"overlap": 0.9, "trainer_busy_s": 1.0},
    "orchestrator": {
        "reward": 0.5,
        "truncated": 0.0,
        "no_signal_groups": 0.1,
        "dropped_stale": 0,
        "completion_tokens": 20.0,
        "outcome/policy": 64,
        "outcome/environment": 0,
    },
}
WRONG = {
    "entropy_collapse": {"entropy": 0.001},
    "mismatch": {"mismatch_kl_mean": 0.5},
    "truncated": {"truncated": 0.9},
    "no_signal": {"no_signal_groups": 1.0},
    "dropped_stale": {"dropped_stale": 20},
    "failing_environment": {"outcome/environment": 64},
    "length_runaway": {"completion_tokens": 100.0},
    "not_finite": {"step_skipped": 1},
    "trainer_idle": {"wait_for_batch_s": 0.95},
    "engines_idle": {"overlap": 0.05},
    "frozen_weights": {"weights_changed": 0.0},
}


def alarms(*overrides: str) -> Alarms:
    return Alarms(compose([f"logging.alarms.window={WINDOW}", *overrides]))


def feed(alarm: Alarms, steps: range, **wrong: float) -> list[str]:
    told = []
    for step in steps:
        for role, good in HEALTHY.items():
            told += alarm.observe(
                "orchestrator" if role == "overlap" else role,
                {"step": step, **good, **{key: wrong[key] for key in wrong if key in good}},
            )
    return told


@pytest.mark.parametrize("kind", WRONG)
def test_each_is_told_once_by_name_and_is_over_when_all_is_well_again(kind):
    alarm = alarms()
    assert feed(alarm, range(1, 11)) == []
    told = feed(alarm, range(11, 21), **WRONG[kind])
    assert [line.split(":")[0].rsplit(" since", 1)[0] for line in told] == [f"alarm {kind}"]
    assert REMEDIES[kind] in told[0]
    assert list(alarm.active) == [kind]
    assert 11 <= alarm.active[kind].since <= 11 + WINDOW
    assert alarm.numbers() == {"active": 1, **{other: int(other == kind) for other in REMEDIES}}
    (over,) = feed(alarm, range(21, 31))
    assert over.startswith(f"alarm {kind} is over at step 2")
    assert alarm.active == {}


@pytest.mark.parametrize("kind", sorted(set(WRONG) - {"not_finite"}))
def test_one_odd_step_is_none(kind):
    alarm = alarms()
    told = feed(alarm, range(1, 20)) + feed(alarm, range(20, 21), **WRONG[kind]) + feed(alarm, range(21, 40))
    assert told == []


@pytest.mark.parametrize("look", LOOKS, ids=lambda look: look.limit)
def test_a_limit_of_null_is_silence(look):
    wrong = {"mismatch_kl_p999": 50.0} if look.limit == "mismatch_kl_p999" else WRONG[look.kind]
    loud, silent = alarms(), alarms(f"logging.alarms.{look.limit}=null")
    for alarm in (loud, silent):
        feed(alarm, range(1, 11))
        feed(alarm, range(11, 31), **wrong)
    assert list(loud.active) == [look.kind]
    assert list(silent.active) == []


def test_frozen_weights_may_be_meant():
    alarm = alarms("logging.alarms.weights_unchanged=false")
    assert feed(alarm, range(1, 21), weights_changed=0.0) == []


def test_roles_that_take_turns_wait_by_design():
    alarm = alarms("algo.max_off_policy_steps=0")
    assert feed(alarm, range(1, 21), wait_for_batch_s=0.99, overlap=0.0) == []


def test_who_waits_beside_an_engine_that_overlaps_does_not_mean_to():
    assert alarms("deployment=colocated").takes_turns
    assert not alarms("deployment=colocated_overlapped").takes_turns


def test_one_of_several_environments_is_named():
    alarm = alarms()
    counts = {"outcome/a/policy": 32, "outcome/b/policy": 4, "outcome/b/timeout": 28}
    told = [
        line for step in range(1, 9) for line in alarm.observe("orchestrator", {"step": step, "reward": 0.1, **counts})
    ]
    assert len(told) == 1
    assert "failed rollouts of b is 0.875" in told[0]


def test_an_environment_that_fails_before_the_first_step_ends_is_named():
    alarm = alarms()
    counts = {"waiting/outcome/policy": 1, "waiting/outcome/timeout": 18}
    assert alarm.observe("orchestrator", {"step": 1, **counts}) == [], "too few to say"
    (told,) = alarm.observe("orchestrator", {"step": 1, **counts | {"waiting/outcome/timeout": 31}})
    assert told.startswith("alarm failing_environment since step 1: of 32 rollouts that the next step waits for 97 %")
    assert "failures.jsonl" in told
    assert alarm.observe("orchestrator", {"step": 1, **HEALTHY["orchestrator"]}) == [
        "alarm failing_environment is over at step 1"
    ]


def test_an_alarm_has_the_step_of_the_role_that_it_is_about():
    alarm = alarms()
    for step in range(1, 30):
        alarm.observe("orchestrator", {"step": step, **HEALTHY["orchestrator"]})
    told = []
    for step in range(1, 2 * WINDOW):
        told += alarm.observe("trainer", {"step": step, **HEALTHY["trainer"], "mismatch_kl_mean": 0.5})
    assert [line.split(":")[0] for line in told] == [f"alarm mismatch since step {WINDOW}"]


def test_rows_that_are_none_of_a_step_or_hold_nonsense_change_nothing():
    alarm = alarms()
    feed(alarm, range(1, 11))
    for row in ({}, {"step": None}, {"step": 11, "eval/reward": 0.5}, {"step": 11, "reward": "x", "truncated": "nan"}):
        assert alarm.observe("orchestrator", row) == []
    assert alarm.observe("trainer", {"step": 11, "step_skipped": 0, "entropy": math.nan, "step_s": 0.0}) == []


def test_status_says_which(tmp_path):
    alarm = alarms()
    feed(alarm, range(1, 11), truncated=0.9)
    told = [one.to_json() for one in alarm.active.values()]
    status = {**EMPTY, "state": "running", "updated": 1.0, "alarms": told}
    (tmp_path / "status.json").write_text(json.dumps(status))
    assert "alarm truncated since step 4: the share of truncated rollouts is 0.9" in render_run(tmp_path, "running")


@pytest.mark.parametrize("begun_with", [0, 40])
def test_a_resumed_run_does_not_tell_again_what_an_earlier_attempt_has_told(tmp_path, begun_with):
    plan = make_plan(compose([f"logging.alarms.window={WINDOW}"]))
    for role in ("trainer/0", "orchestrator"):
        with contextlib.closing(MetricsWriter(tmp_path, role)) as writer:
            for step in range(1, 21):
                writer.log(step=step, **HEALTHY[role.split("/")[0]] | ({"truncated": 0.9} if step > 10 else {}))
    view = RunView(plan, tmp_path, step=begun_with)
    view.poll()
    assert list(view.alarms.active) == ["truncated"]
    assert ("alarms", "truncated") in view.cells()
    told = [line.split(":")[0] for line in view.take_told()]
    assert [line.split(" since")[0] for line in told] == ([] if begun_with else ["alarm truncated"])
    assert view.take_told() == []
    assert (tmp_path / "metrics/alarms.jsonl").exists() == (begun_with == 0)


# --- whether weights change -------------------------------------------------------------------------------------------


def test_the_sample_is_small_and_sees_a_step_of_every_layer():
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(100)))
    before = sample_weights(model)
    assert before.numel() <= SAMPLED
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1.0)
    assert (before != sample_weights(model)).all()
    assert (sample_weights(model) == sample_weights(model)).all()
    params = list(model.parameters())
    for part in (params[:50], params[50:100], params[100:150], params[150:]):
        before = sample_weights(model)
        with torch.no_grad():
            for param in part:
                param.add_(1.0)
        assert 0.2 < (before != sample_weights(model)).float().mean() < 0.3
    assert sample_weights(nn.Sequential()).numel() == 0


# --- planted ----------------------------------------------------------------------------------------------------------

QUICK = ["optimizer is frozen", "environment raises", "reward is the same for all"]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_planted_fault_is_named(tmp_path, name):
    """Those that show from random weights on, too."""
    own = ["warm_start=none", "inference.sampling.max_tokens=16", "logging.alarms.truncated=null", "max_steps=8"]
    found = planted.play(name, tmp_path, *own)
    assert list(found) == [planted.PLANTED[name][2]]
    trained = rows(tmp_path / name.replace(" ", "-"), "trainer.0")
    assert all((row["weights_changed"] == 0) == (name == QUICK[0]) for row in trained)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_nine_of_ten_planted_faults_are_named(tmp_path):
    named = [planted.PLANTED[name][2] in planted.play(name, tmp_path) for name in planted.PLANTED]
    assert sum(named) >= 0.9 * len(named), dict(zip(planted.PLANTED, named, strict=True))
