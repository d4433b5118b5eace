"""What becomes of a group whose rollouts failed: it is counted, replaced, and never lost in silence."""

from __future__ import annotations

import asyncio

import pytest

from prl.config import compose
from prl.orchestrator.rollouts.producer import Producer
from prl.orchestrator.rollouts.rollout import FailedRollout, Group, Rollout, Sample
from prl.orchestrator.rollouts.tasks import TaskSampler


class OneEnd:
    """A runner each of whose groups ends in the same way."""

    version = 0

    def __init__(self, end):
        self.end = end

    def start_group(self, index, choice, size):
        return asyncio.create_task(self.end(index, size))


async def raises(index, size):
    raise LookupError("found out late")


async def is_cancelled(index, size):
    raise asyncio.CancelledError


async def cannot_be_counted(index, size):
    rollout = Rollout("a", "task", 1.0, [Sample()], 1, 1, False, 1, metrics=[1.0])
    return Group(index, "a", size, [rollout] * size)


async def half(index, size):
    good = Rollout("", "task", float(index % 2), [Sample()], 1, 1, False, 1)
    kinds = ["policy", "grader"] if index % 3 else ["timeout", "environment"]
    rollouts = [good if kind == "policy" else FailedRollout(kind, "x") for kind in kinds]
    return Group(index, "ab"[index % 2], size, rollouts)


def test_outcomes_are_counted_by_environment_and_lost_groups_replaced():
    async def scenario():
        config = compose(["warm_start=none", "algo.group_size=2", "algo.batch_size=6", "algo.filter_zero_signal=false"])
        sampler = TaskSampler({"a": 20, "b": 20}, {"a": 1.0, "b": 1.0}, seed=0)
        producer = Producer(config, OneEnd(half), sampler, taking_turns=True)
        step = await asyncio.wait_for(producer.next_step(), 60)
        await producer.stop()
        return step

    step = asyncio.run(scenario())
    assert len(step.groups) == 3
    assert all(group.index % 3 for group in step.groups)
    total, by_env = step.outcome_counts(several=False), step.outcome_counts(several=True)
    assert total["outcome/policy"] == total["outcome/grader"] >= 3
    assert total["outcome/timeout"] == total["outcome/environment"] == step.failed_groups >= 1
    assert total["outcome/infrastructure"] == 0
    for kind in ("policy", "grader", "timeout", "environment", "infrastructure"):
        assert by_env[f"outcome/a/{kind}"] + by_env[f"outcome/b/{kind}"] == total[f"outcome/{kind}"]


@pytest.mark.parametrize(
    ("end", "words"),
    [(raises, "found out late"), (is_cancelled, "cancelled by nobody"), (cannot_be_counted, "no attribute 'items'")],
)
def test_no_group_is_lost_in_silence(end, words):
    """Whatever a group dies of, `next_step` raises it."""

    async def scenario():
        config = compose(["warm_start=none", "algo.group_size=2", "algo.batch_size=6"])
        producer = Producer(config, OneEnd(end), TaskSampler({"a": 20}, {"a": 1.0}, seed=0), taking_turns=False)
        await asyncio.wait_for(producer.next_step(), 60)

    with pytest.raises(Exception, match=words):
        asyncio.run(scenario())
