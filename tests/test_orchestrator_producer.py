"""Groups in, optimizer steps out: the staleness bound, filtering, failures, resuming, batches."""

import asyncio
import random

import numpy as np
import pytest

from prl.config import compose
from prl.orchestrator.batching import MOST_LAGS, build_batches, encode_step, lag_columns, release, staleness
from prl.orchestrator.engines.generation import Generation
from prl.orchestrator.rollouts.producer import GROUPS_A_TURN, Producer, StepGroups
from prl.orchestrator.rollouts.rollout import FailedRollout, Group, Rollout, Sample
from prl.orchestrator.rollouts.tasks import TaskSampler
from prl.transport.batch import TrainBatch
from prl.transport.serving import InPieces

GROUP_SIZE, GROUPS = 2, 3
FAILED = FailedRollout("grader", "no reward")


def config_of(*overrides, max_off_policy_steps=2):
    return compose(
        [
            "warm_start=none", "max_steps=12", "algo.group_size=2", "algo.batch_size=6",
            f"algo.max_off_policy_steps={max_off_policy_steps}", *overrides,
        ]
    )  # fmt: skip


def rollout_of(env, reward, versions, prompt=3, length=4, truncated=False):
    """Its tokens are split evenly between `versions`."""
    per_token = sorted(versions[i % len(versions)] for i in range(length))
    sample = Sample()
    sample.append_prompt(list(range(prompt)))
    sample.append_generation(Generation(list(range(prompt, prompt + length)), [-1.0] * length, per_token, "stop", None))
    return Rollout(env, "task", reward, [sample], prompt, length, truncated, 1)


class StubRunner:
    """Groups end when told to. Their tokens carry the version at their start and the one at their end."""

    def __init__(self, rewards=lambda index: [0.0, 1.0]):
        self.version, self.rewards = 0, rewards
        self.started, self.running = [], {}

    def start_group(self, index, choice, size):
        assert size == GROUP_SIZE
        assert index not in self.running
        self.started.append(index)
        begun, end = self.version, asyncio.Event()
        self.running[index] = end

        async def run():
            await end.wait()
            del self.running[index]
            outcome = self.rewards(index)
            if isinstance(outcome, Exception):
                raise outcome
            versions = [begun, self.version]
            rollouts = [FAILED if r is None else rollout_of(choice.env, r, versions) for r in outcome]
            return Group(index, choice.env, size, rollouts)

        return asyncio.create_task(run())

    def end(self, *indices):
        for index in indices:
            self.running[index].set()


def producer_of(runner, config=None, taking_turns=False):
    sampler = TaskSampler({"a": 20, "b": 5}, {"a": 2.0, "b": 1.0}, seed=0)
    return Producer(config or config_of(), runner, sampler, taking_turns)


async def settle():
    for _ in range(20):
        await asyncio.sleep(0)


async def run_ending_all(runner, producer, rng=None):
    """next_step, with running groups ended in index order, or in random order."""
    step = asyncio.create_task(producer.next_step())
    for _ in range(500):
        await settle()
        if step.done():
            return step.result()
        left = [index for index, event in runner.running.items() if not event.is_set()]
        if left:
            runner.end(rng.choice(left) if rng else min(left))
    raise AssertionError("no step came")


# --- the staleness bound ----------------------------------------------------------------------------------------------


async def simulate(seed, max_off_policy_steps, taking_turns=False, rewards=lambda index: [0.0, 1.0]):
    """A feeding loop, a trainer and engines at random speeds. Returns the handed-out steps and the runner."""
    rng = random.Random(seed)
    config = config_of(max_off_policy_steps=max_off_policy_steps)
    runner = StubRunner(rewards)
    producer = producer_of(runner, config, taking_turns)
    queue, handed, speed = asyncio.Queue(), [], rng.choice([1, 5, 25])

    async def feed():
        for _ in range(config.max_steps):
            step = await producer.next_step()
            handed.append(step)
            queue.put_nowait(step)

    async def train():
        for version in range(1, config.max_steps + 1):
            step = await queue.get()
            assert step.step == version
            for _ in range(rng.randrange(1, 4 * speed)):
                await asyncio.sleep(0)
            await producer.set_version(version)

    async def engines():
        while True:
            running = [index for index, event in runner.running.items() if not event.is_set()]
            if running and rng.random() < 0.5:
                slow = rng.random() < 0.05
                runner.end(max(running) if slow else rng.choice(running))
            for _ in range(rng.randrange(1, 12)):
                await asyncio.sleep(0)

    serving = asyncio.create_task(engines())
    await asyncio.wait_for(asyncio.gather(feed(), train()), 20)
    serving.cancel()
    await producer.stop()
    return handed, runner


@pytest.mark.parametrize("max_off_policy_steps", [0, 1, 2, 5])
def test_no_token_older_than_the_bound_is_ever_handed_out(max_off_policy_steps):
    oldest_lag, dropped = 0, 0
    for seed in range(10):
        handed, _ = asyncio.run(simulate(seed, max_off_policy_steps))
        assert [step.step for step in handed] == list(range(1, 13))
        indices = [group.index for step in handed for group in step.groups]
        assert len(indices) == len(set(indices)) == 12 * GROUPS
        for step in handed:
            for group in step.groups:
                lags = [step.step - 1 - v for r in group.finished for s in r.samples for v in s.versions if v >= 0]
                assert 0 <= max(lags) <= max_off_policy_steps
                oldest_lag = max(oldest_lag, *lags)
            dropped += step.dropped_stale
    assert oldest_lag == max_off_policy_steps  # the bound is made use of
    assert dropped == 0 or max_off_policy_steps > 0


@pytest.mark.parametrize("rewards", [lambda i: [0.0, 1.0], lambda i: [1.0, 1.0] if i % 3 == 0 else [0.0, 1.0]])
def test_synchronous_steps_do_not_depend_on_timing(rewards):
    runs = [asyncio.run(simulate(seed, 0, rewards=rewards))[0] for seed in range(8)]
    layouts = {tuple(tuple(g.index for g in step.groups) for step in run) for run in runs}
    assert len(layouts) == 1


def test_taking_turns_generates_nothing_ahead():
    handed, _ = asyncio.run(simulate(3, 2, taking_turns=True))
    assert {step.step - 1 - group.oldest_version for step in handed for group in step.groups} == {0}


def test_generation_runs_ahead_as_far_as_the_bound_allows():
    async def scenario(bound):
        runner = StubRunner()
        producer = producer_of(runner, config_of(max_off_policy_steps=bound))
        producer.start_groups()
        await settle()
        count = len(runner.running)
        await producer.stop()
        return count

    assert [asyncio.run(scenario(bound)) for bound in (0, 1, 3)] == [GROUPS, 2 * GROUPS, 4 * GROUPS]


def test_a_stale_group_is_dropped_counted_and_replaced():
    async def scenario():
        runner = StubRunner()
        producer = producer_of(runner, config_of(max_off_policy_steps=1))
        producer.start_groups()
        await settle()
        straggler = 0
        for version in (1, 2):
            step = asyncio.create_task(producer.next_step())
            await settle()
            runner.end(*[i for i in runner.running if i != straggler])
            assert straggler not in [g.index for g in (await step).groups]
            await producer.set_version(version)
        runner.end(straggler)  # sampled by version 0; step 3 may train on version 1 at the oldest
        third = await run_ending_all(runner, producer)
        await producer.stop()
        return third

    third = asyncio.run(scenario())
    assert (third.dropped_stale, third.dropped_stale_rollouts, third.dropped_stale_requests) == (1, 2, 2)
    assert third.dropped_stale_tokens == 8
    assert len(third.groups) == GROUPS
    assert 0 not in [g.index for g in third.groups]


# --- filtering and failures -------------------------------------------------------------------------------------------


def test_groups_without_signal_are_replaced_up_to_the_limit():
    async def scenario(ratio):
        runner = StubRunner(lambda index: [1.0, 1.0])
        producer = producer_of(runner, config_of(f"algo.max_replacement_ratio={ratio}"))
        steps = [await run_ending_all(runner, producer) for _ in range(2)]
        await producer.stop()
        return steps

    for ratio, filtered in ((0.0, 0), (1.0, GROUPS), (2.0, 2 * GROUPS)):
        for step in asyncio.run(scenario(ratio)):
            assert len(step.groups) == GROUPS
            assert step.filtered_groups == filtered
            assert all(r.advantage == 0.0 for g in step.groups for r in g.finished)


def test_only_groups_without_signal_are_filtered_and_their_rewards_still_count():
    async def scenario():
        runner = StubRunner(lambda index: [1.0, 1.0] if index in (1, 2) else [0.0, 1.0])
        producer = producer_of(runner)
        step = await run_ending_all(runner, producer)
        await producer.stop()
        return step

    step = asyncio.run(scenario())
    assert [g.index for g in step.groups] == [0, 3, 4]
    assert (step.filtered_groups, step.rollouts, step.completion_tokens) == (2, 10, 40)
    assert sorted(step.rewards) == [0.0] * 3 + [1.0] * 7
    assert sum(len(x) for x in step.rewards_by_env.values()) == 10
    assert [r.advantage for g in step.groups for r in g.finished] == [-0.5, 0.5] * 3


def test_groups_without_signal_are_kept_when_told_so():
    async def scenario():
        runner = StubRunner(lambda index: [1.0, 1.0])
        producer = producer_of(runner, config_of("algo.filter_zero_signal=false"))
        step = await run_ending_all(runner, producer)
        await producer.stop()
        return step

    step = asyncio.run(scenario())
    assert [g.index for g in step.groups] == [0, 1, 2]
    assert step.filtered_groups == 0


def test_failed_rollouts_leave_the_rest_of_their_group():
    outcomes = {0: [None, None], 1: [None, 1.0], 2: [0.0, 1.0]}

    async def scenario():
        runner = StubRunner(lambda index: outcomes.get(index, [0.0, 1.0]))
        producer = producer_of(runner, config_of("algo.filter_zero_signal=false"))
        step = await run_ending_all(runner, producer)
        await producer.stop()
        return step

    step = asyncio.run(scenario())
    assert [g.index for g in step.groups] == [1, 2, 3]
    assert [len(g.finished) for g in step.groups] == [1, 2, 2]
    assert step.groups[0].finished[0].advantage == 0.0  # alone there is no baseline
    assert step.rollouts == 5
    assert step.failed_groups == 1
    assert step.outcome_counts(several=False) | {"outcome/policy": 5, "outcome/grader": 3} == step.outcome_counts(False)


def test_what_kills_all_rollouts_ends_the_run():
    async def scenario():
        runner = StubRunner(lambda index: RuntimeError("200 rollouts in a row failed"))
        producer = producer_of(runner)
        try:
            with pytest.raises(RuntimeError, match="200 rollouts in a row"):
                await run_ending_all(runner, producer)
        finally:
            await producer.stop()

    asyncio.run(scenario())


# --- holding, resuming ------------------------------------------------------------------------------------------------


def test_nothing_starts_while_held():
    async def scenario():
        runner = StubRunner()
        producer = producer_of(runner, config_of(max_off_policy_steps=0))
        await producer.hold(True)
        step = asyncio.create_task(producer.next_step())
        await settle()
        assert not runner.started
        await producer.hold(False)
        await settle()
        assert len(runner.started) == GROUPS
        step.cancel()
        await producer.stop()

    asyncio.run(scenario())


def test_nothing_starts_beyond_the_last_step():
    handed, runner = asyncio.run(simulate(0, 5))
    assert len(handed) == 12
    dropped = sum(step.dropped_stale for step in handed)
    assert len(runner.started) <= 12 * GROUPS + dropped + GROUPS


@pytest.mark.parametrize("max_off_policy_steps", [0, 2])
@pytest.mark.parametrize("seed", range(5))
def test_a_resumed_producer_runs_outstanding_groups_again_and_skips_none(seed, max_off_policy_steps):
    async def scenario():
        rng = random.Random(seed)
        config = config_of(max_off_policy_steps=max_off_policy_steps)
        first_runner = StubRunner()
        first = producer_of(first_runner, config)
        trained = []
        for version in range(1, 4):
            step = await run_ending_all(first_runner, first, rng)
            trained += [g.index for g in step.groups]
            state = first.state()
            await first.set_version(version)
        await first.stop()
        assert set(trained) | set(state["outstanding"]) == set(range(state["next_group"]))
        assert not set(trained) & set(state["outstanding"])

        runner = StubRunner()
        runner.version = 3
        second = producer_of(runner, config)
        second.resume(3, state)
        assert second.state() == state  # a checkpoint right after the resume loses nothing
        handed = [await run_ending_all(runner, second)]
        assert handed[0].step == 4
        again = second.state()
        seen = {*trained, *(g.index for g in handed[0].groups), *again["outstanding"]}
        assert seen == set(range(again["next_group"]))
        assert runner.started[: len(state["outstanding"])] == state["outstanding"][: len(runner.started)]
        await second.stop()

    asyncio.run(scenario())


# --- batches ----------------------------------------------------------------------------------------------------------


def step_of(*rollouts, step=5):
    return StepGroups(step, [Group(0, "a", len(rollouts), list(rollouts))])


def test_a_step_whose_groups_were_all_counted_before_has_their_rewards():
    groups = step_of(rollout_of("a", 1.0, [4]), rollout_of("a", 0.0, [4]))
    assert groups.sampled_rewards == [1.0, 0.0]
    groups.count("a", [rollout_of("a", 0.5, [4])])
    assert groups.sampled_rewards == [0.5], "as long as something finished, that is what the policy does now"


def test_a_step_whose_groups_were_all_counted_before_has_their_shares():
    """0 would say that nothing was cut off, and that every group taught something."""
    cut, whole = rollout_of("a", 1.0, [4]), rollout_of("a", 1.0, [4])
    cut.truncated = True
    groups = step_of(cut, whole)
    assert (groups.truncated_share, groups.no_signal_share) == (0.5, 1.0)
    cut.advantage = 1.0
    assert groups.no_signal_share == 0.0
    groups.count("a", [cut])
    groups.scored_groups, groups.no_signal_groups = 4, 1
    assert (groups.truncated_share, groups.no_signal_share) == (1.0, 0.25)


def test_batches_carry_advantages_on_sampled_tokens_only():
    good, bad = rollout_of("a", 1.0, [4]), rollout_of("a", 0.0, [3, 4], prompt=2, length=2)
    good.advantage, bad.advantage = 0.5, -0.25
    (batch,) = build_batches(step_of(good, bad), seq_len=64, data_ranks=1, meta={"stop": False})
    (micro,) = batch.micro_batches
    assert (batch.step, batch.loss_tokens, batch.loss_docs, batch.meta) == (5, 6, 2, {"stop": False})
    assert micro.doc_lens.tolist() == [7, 4]
    assert micro.advantages.tolist() == [0, 0, 0, 0.5, 0.5, 0.5, 0.5, 0, 0, -0.25, -0.25]
    assert micro.loss_mask.tolist() == [a != 0 for a in micro.advantages]
    assert micro.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    assert sorted(staleness([batch]).tolist()) == [0, 0, 0, 0, 0, 1]


def test_encoded_batches_are_forgotten_and_who_sends_one_keeps_it():
    rollouts = [rollout_of("a", 1.0, [4], prompt=3, length=10) for _ in range(2)]
    for rollout in rollouts:
        rollout.samples[0].routing = [np.ones((12, 2, 1), dtype=np.uint8)]
    encoded = encode_step(step_of(*rollouts), seq_len=16, data_ranks=2, meta={})
    assert [rollout.samples[0].routing for rollout in rollouts] == [[], []], "it is in the batches"
    whole, sending = bytes(encoded.messages[0]), InPieces(encoded.messages[0])
    assert all(row.routed_experts.all() for row in TrainBatch.from_bytes(whole).micro_batches)
    release([encoded])
    assert not any(message.parts for message in encoded.messages)
    sent = []

    class Writer:
        async def write(self, piece):
            sent.append(bytes(piece))

    asyncio.run(sending.write(Writer()))
    assert (b"".join(sent), sending.size) == (whole, len(whole))


def test_samples_are_cut_to_the_row_and_only_kept_tokens_count():
    long, none_left = rollout_of("a", 1.0, [4], prompt=3, length=10), rollout_of("a", 1.0, [2], prompt=12, length=3)
    long.samples[0].routing = [np.zeros((12, 2, 1), dtype=np.uint8)]
    none_left.samples[0].routing = [np.zeros((14, 2, 1), dtype=np.uint8)]
    (batch,) = build_batches(step_of(long, none_left), seq_len=8, data_ranks=1, meta={})
    assert (batch.loss_tokens, batch.loss_docs) == (5, 1)
    assert [m.num_tokens for m in batch.micro_batches] == [8, 8]
    assert all(m.routed_experts.shape == (8, 2, 1) for m in batch.micro_batches)
    assert staleness([batch]).tolist() == [0] * 5


@pytest.mark.parametrize("data_ranks", [1, 2, 3])
def test_loss_tokens_are_global_and_each_is_trained_once(data_ranks):
    rollouts = [rollout_of("a", 1.0, [4], length=n) for n in (1, 9, 4, 7, 2)]
    batches = build_batches(step_of(*rollouts), seq_len=14, data_ranks=data_ranks, meta={})
    assert len(batches) == data_ranks
    assert {b.loss_tokens for b in batches} == {23}
    assert sum(int(m.loss_mask.sum()) for b in batches for m in b.micro_batches) == 23
    assert len({len(b.micro_batches) for b in batches}) == 1
    assert len(staleness(batches)) == 23


def test_no_token_is_read_again_to_know_how_old_a_group_is():
    class Unread(list[int]):
        def __iter__(self):
            raise AssertionError("tokens are read")

    rollouts = [rollout_of("a", 1.0, [4, 6]), rollout_of("a", 1.0, [5])]
    for rollout in rollouts:
        rollout.samples[0].append_generation(
            Generation([1, 2], [-1.0, -1.0], [7, 8 - rollout.oldest_version], "stop", None)
        )
        rollout.samples[0].versions = Unread()
    assert [rollout.oldest_version for rollout in rollouts] == [4, 3]
    assert Group(0, "a", 2, [*rollouts, FAILED]).oldest_version == 3


def test_a_conversation_in_pieces_gives_several_documents_with_one_advantage():
    rollout = rollout_of("a", 1.0, [4])
    rollout.samples.append(rollout_of("a", 1.0, [3], length=2).samples[0])
    rollout.advantage = 0.75
    (batch,) = build_batches(step_of(rollout), seq_len=64, data_ranks=1, meta={})
    assert batch.loss_docs == 2
    assert set(batch.micro_batches[0].advantages.tolist()) == {0.0, 0.75}
    assert rollout.oldest_version == 3


def test_a_bound_that_means_none_costs_nothing() -> None:
    """Its counts were a list of a thousand million zeros."""
    assert lag_columns(np.array([0, 2, 2]), 2)["staleness_hist"] == [1, 0, 2]
    assert len(lag_columns(np.array([70]), 10**9)["staleness_hist"]) == 71
    assert lag_columns(np.zeros(0, np.int32), 10**9) == {
        "staleness_mean": 0.0, "staleness_max": 0, "staleness_hist": [0] * (MOST_LAGS + 1),
    }  # fmt: skip


# --- beginning --------------------------------------------------------------------------------------------------------


def test_groups_begin_some_in_a_turn_and_none_after_a_stop():
    """Requests, answers and signals have their turns between."""

    async def begun(stops):
        runner = StubRunner()
        producer = producer_of(runner, config_of("algo.batch_size=200"))
        producer.start_groups()
        at_once = len(runner.started)
        if stops:
            await producer.stop()
        for _ in range(5):
            await settle()
        return at_once, runner.started

    at_once, started = asyncio.run(begun(stops=False))
    assert at_once == GROUPS_A_TURN
    assert started == list(range(300)), "three batches, in order, each group once"
    at_once, started = asyncio.run(begun(stops=True))
    assert len(started) == at_once == GROUPS_A_TURN


def test_what_goes_wrong_in_a_later_turn_is_heard_of():
    class Failing(StubRunner):
        def start_group(self, index, choice, size):
            if index == GROUPS_A_TURN + 3:
                raise RuntimeError("no such task")
            return super().start_group(index, choice, size)

    async def step():
        await producer_of(Failing(), config_of("algo.batch_size=200")).next_step()

    with pytest.raises(RuntimeError, match="no such task"):
        asyncio.run(asyncio.wait_for(step(), 10))
