"""Which task comes when, sampling seeds, and held-out evaluation."""

import asyncio
import errno
import itertools
import math
import os
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prl.config import compose
from prl.config.schema import EvalConfig, SamplingConfig
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.loop import Orchestrator
from prl.orchestrator.rollouts.evaluation import choose_tasks, evaluate, pass_at_k
from prl.orchestrator.rollouts.rollout import FailedRollout, Rollout, Sample
from prl.orchestrator.rollouts.tasks import TaskSampler, request_seed
from prl.planning.planner import make_plan

COUNTS, WEIGHTS = {"b": 7, "a": 30}, {"a": 3.0, "b": 1.0}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=20), st.integers(0, 3))
def test_a_task_is_a_pure_function_of_seed_and_index(indices, seed):
    whole = TaskSampler(COUNTS, WEIGHTS, seed)
    expected = [whole[i] for i in range(201)]
    other = TaskSampler(dict(reversed(COUNTS.items())), WEIGHTS, seed)
    assert [other[i] for i in indices] == [expected[i] for i in indices]


def test_epochs_go_without_repetition_and_differ():
    sampler = TaskSampler({"a": 10}, {"a": 1.0}, 0)
    drawn = [sampler[i].index for i in range(40)]
    epochs = [drawn[i : i + 10] for i in range(0, 40, 10)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_environments_are_mixed_by_weight_each_with_epochs_of_its_own():
    sampler = TaskSampler(COUNTS, WEIGHTS, 5)
    drawn = [sampler[i] for i in range(2000)]
    assert sum(choice.env == "a" for choice in drawn) / 2000 == pytest.approx(0.75, abs=0.03)
    seen = Counter(choice.index for choice in drawn if choice.env == "b")
    assert set(seen) == set(range(7))
    assert max(seen.values()) - min(seen.values()) <= 1


def test_seeds_of_a_run_differ():
    one, two = ([TaskSampler(COUNTS, WEIGHTS, s)[i] for i in range(20)] for s in (0, 1))
    assert one != two


def test_request_seeds_are_stable_31_bit_and_distinct():
    seeds = [request_seed(0, f"train-{i:09d}-0000-000") for i in range(5000)]
    assert seeds[:2] == [request_seed(0, "train-000000000-0000-000"), request_seed(0, "train-000000001-0000-000")]
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert len(set(seeds)) > 4990
    assert request_seed(0, "x") != request_seed(1, "x")


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "passed", "k"), [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]
)
def test_pass_at_k_equals_enumeration(n, passed, k):
    """The share of all k-subsets of the samples that hold at least one that passed."""
    subsets = list(itertools.combinations([i < passed for i in range(n)], k))
    assert pass_at_k(n, passed, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


def test_the_same_tasks_are_evaluated_every_time():
    assert choose_tasks(100, 10) == choose_tasks(100, 10)
    assert choose_tasks(3, 10) == [0, 1, 2]


class ScriptedRunner:
    """Rollouts with known rewards; None fails."""

    def __init__(self, rewards):
        self.rewards, self.samplings, self.names = rewards, [], []

    def start_rollout(self, choice, split, name, sampling):
        assert split == "held_out"
        self.samplings.append(sampling)
        self.names.append(name)
        reward = self.rewards[choice.env][choice.index][int(name[-4:])]

        async def run():
            if reward is None:
                return FailedRollout("environment", "it raised")
            return Rollout(choice.env, "t", reward, [Sample()], 1, 5, False, 1)

        return asyncio.create_task(run())


def test_evaluation_by_hand():
    rewards = {"a": [[1.0, 0.5], [0.5, 0.5], [None, 1.0]], "b": [[None, None], [1.0, 1.0]]}
    runner = ScriptedRunner(rewards)

    async def scenario():
        config = EvalConfig(num_tasks=10, k=2, temperature=0.3, pass_threshold=1.0)
        return await evaluate(runner, config, SamplingConfig(temperature=0.9, top_p=0.5), {"a": 3, "b": 2}, version=7)

    row = asyncio.run(scenario())
    assert row["eval/a/avg@2"] == pytest.approx((0.75 + 0.5 + 1.0) / 3)
    assert row["eval/a/pass@2"] == pytest.approx(2 / 3)
    assert row["eval/b/avg@2"] == row["eval/b/pass@2"] == 1.0
    assert row["eval/reward"] == pytest.approx((1 + 0.5 + 0.5 + 0.5 + 1 + 1 + 1) / 7)
    assert row["eval/failed_rollouts"] == row["eval/outcome/environment"] == 3
    assert row["eval/outcome/policy"] == 7
    assert {(s.temperature, s.top_p) for s in runner.samplings} == {(0.3, 0.5)}
    assert len(set(runner.names)) == 10
    assert all(name.startswith("eval-000007-") for name in runner.names)


@pytest.mark.parametrize("failures", [1, 2, 3])
def test_samples_that_fall_to_the_infrastructure_are_drawn_again(failures):
    class Unlucky(ScriptedRunner):
        def start_rollout(self, choice, split, name, sampling):
            job = super().start_rollout(choice, split, name, sampling)
            if choice.index == 1 and self.names.count(name) <= failures:
                job.cancel()
                return asyncio.create_task(asyncio.sleep(0, FailedRollout("infrastructure", "an engine died")))
            return job

    async def scenario():
        runner = Unlucky({"a": [[1.0], [0.0]]})
        return await evaluate(runner, EvalConfig(k=1), SamplingConfig(), {"a": 2}, version=0), runner.names

    row, names = asyncio.run(scenario())
    assert row["eval/reward"] == (0.5 if failures < 3 else 1.0)
    assert row["eval/outcome/infrastructure"] == (failures == 3)
    assert len(names) == 2 + min(failures, 2)


def test_an_evaluation_that_falls_to_the_infrastructure_whole_is_none():
    class Down(ScriptedRunner):
        def start_rollout(self, choice, split, name, sampling):
            return asyncio.create_task(asyncio.sleep(0, FailedRollout("infrastructure", "an engine died")))

    with pytest.raises(EngineError, match="an engine died"):
        asyncio.run(evaluate(Down({"a": [[1.0], [1.0]]}), EvalConfig(k=1), SamplingConfig(), {"a": 2}, version=0))


def test_an_evaluation_whose_row_finds_no_room_is_not_over(monkeypatch):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse():
        raise full

    async def evaluated(*_):
        return {"eval/reward": 1.0}

    async def hold(_):
        pass

    monkeypatch.setattr("prl.orchestrator.loop.evaluate", evaluated)
    metrics = SimpleNamespace(log=lambda **row: None, flush=refuse)
    plan = make_plan(compose([]))
    orchestrator = Orchestrator(SimpleNamespace(plan=plan, resume_step=0, metrics=metrics, run_dir=Path("unused")))
    orchestrator.runner, orchestrator.envs = SimpleNamespace(version=1, lockstep=None), {}
    orchestrator.producer = SimpleNamespace(hold=hold)
    with pytest.raises(OSError, match="No space") as raised:
        asyncio.run(orchestrator._evaluate(1))
    assert raised.value is full
    assert orchestrator.evaluations.evaluated == set()


def test_an_evaluation_in_which_all_fails_has_no_reward():
    async def scenario():
        runner = ScriptedRunner({"a": [[None], [None]]})
        return await evaluate(runner, EvalConfig(), SamplingConfig(), {"a": 2}, version=0)

    row = asyncio.run(scenario())
    assert row["eval/reward"] is None or math.isnan(row["eval/reward"])
    assert row["eval/failed_rollouts"] == 2
