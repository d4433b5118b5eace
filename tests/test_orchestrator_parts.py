"""The orchestrator's parts, each alone: orders of events that its states must bear, without processes or sockets."""

import asyncio
import json
import time

import numpy as np
import pytest
from role_context import context_of
from test_orchestrator_restarts import until

from prl.config.schema import EvalConfig
from prl.orchestrator.batching import EncodedStep
from prl.orchestrator.checkpointing import Checkpointing
from prl.orchestrator.evaluations_due import EvaluationsDue
from prl.orchestrator.handout import Handout
from prl.orchestrator.publications import Publications
from prl.orchestrator.server import BadRequest
from prl.runtime.directory.checkpoints import ORCHESTRATOR, latest_valid, parts_of, staging_dir, step_dir
from prl.transport.batch import TrainBatch

# --- batches handed out -----------------------------------------------------------------------------------------------


class Told:
    """Who is asked whether to publish again: behind the publications in `wanted`, and told so ever after."""

    def __init__(self, *wanted):
        self.wanted, self.told = set(wanted), set()

    def asked_again(self, publications):
        return publications in self.told

    def ask_again(self, publications, instead_of_batch):
        self.told |= {publications} & self.wanted
        return publications in self.wanted


def handout_of(again=None, ahead=0, generated_s=float, resume_step=0):
    return Handout(resume_step, ahead, again or Told(), generated_s)


def encoded(step, ranks=2):
    meta = {"stop": False, "publish_again": False, "checkpoint": False}
    return EncodedStep([TrainBatch(step, [], rank, 0, meta).to_message() for rank in range(ranks)], np.zeros(0))


async def order(handout, step, rank=0, publications=1, timeout_s=0.0):
    """What a rank gets: (step, rank) of a batch, or the order."""
    message = await handout.take(step, rank, publications, timeout_s)
    if message is None:
        return None
    batch = TrainBatch.from_bytes(bytes(message))
    return next((key for key in ("stop", "publish_again") if batch.meta[key]), (batch.step, batch.loss_tokens))


def test_each_rank_gets_its_part_once_it_is_ready_and_as_often_as_it_asks():
    async def scenario():
        handout = handout_of()
        waiting = [asyncio.create_task(order(handout, 1, rank, timeout_s=60)) for rank in range(2)]
        await asyncio.sleep(0)
        assert await order(handout, 1) is None
        await handout.add(1, encoded(1))
        assert await asyncio.gather(*waiting) == [(1, 0), (1, 1)]
        assert await order(handout, 1, 1) == (1, 1)
        assert await order(handout, 2) is None, "of another step"
        with pytest.raises(BadRequest, match="2 data ranks"):
            await order(handout, 1, 2)

    asyncio.run(scenario())


@pytest.mark.parametrize("ahead", [0, 2])
def test_so_many_batches_are_in_memory_and_a_rank_that_lags_by_as_much_finds_its_own(ahead):
    async def scenario():
        handout, dropped = handout_of(ahead=ahead), []
        for step in range(1, 8):
            dropped += await handout.add(step, encoded(step))
            assert len(handout.batches) == min(step, ahead + 2)
            assert await order(handout, oldest := max(1, step - ahead - 1), 1) == (oldest, 1)
        assert [TrainBatch.from_bytes(bytes(one.messages[0])).step for one in dropped] == list(range(1, 6 - ahead))

    asyncio.run(scenario())


def test_a_stop_lets_ranks_that_lag_behind_have_what_another_has_and_nobody_more():
    async def scenario():
        handout = handout_of(resume_step=3)
        await handout.add(4, encoded(4))
        await handout.add(5, encoded(5))
        assert await order(handout, 4, 1) == (4, 1)
        ahead = asyncio.create_task(order(handout, 6, 1, timeout_s=60))
        await asyncio.sleep(0)
        assert not handout.is_stopping
        assert await handout.stop() == 5
        assert handout.is_stopping
        assert await order(handout, 4, 0) == (4, 0), "a late rank"
        assert [await order(handout, 5, rank) for rank in (0, 1)] == ["stop", "stop"], "though it is ready"
        assert await ahead == "stop", "who waits is told at once"

    asyncio.run(scenario())


def test_a_stop_before_anything_was_taken_ends_at_the_step_that_was_resumed():
    async def scenario():
        handout = handout_of(resume_step=3)
        await handout.add(4, encoded(4))
        assert await handout.stop() == 4
        assert await order(handout, 4) == "stop"

    asyncio.run(scenario())


def test_what_one_rank_was_told_all_are_told_at_the_same_point():
    async def scenario():
        again = Told(1)
        handout = handout_of(again)
        assert await order(handout, 1, 0) == "publish_again"
        again.wanted.clear()
        await handout.add(1, encoded(1))
        await handout.stop()
        assert await order(handout, 1, 1) == "publish_again", "a rank that asks late, after a stop and with a batch"
        assert await order(handout, 1, 1, publications=2) == "stop"

    asyncio.run(scenario())


def test_a_step_that_somebody_has_taken_is_not_put_off():
    async def scenario():
        again = Told()
        handout = handout_of(again)
        await handout.add(1, encoded(1))
        assert await order(handout, 1, 0) == (1, 0)
        again.wanted.add(1)
        assert await order(handout, 1, 1) == (1, 1), "or ranks would meet at different points"
        assert await order(handout, 2, 1) == "publish_again"

    asyncio.run(scenario())


def test_who_waited_for_whom_is_told_once_and_only_of_what_was_taken():
    async def scenario():
        generated = [10.0]
        handout = handout_of(generated_s=lambda: generated[0])
        await handout.add(1, encoded(1))
        await asyncio.sleep(0.05)
        await order(handout, 1, 1)
        assert handout.trained(1) is None, "rank 0 has not begun"
        await order(handout, 1, 0)
        time.sleep(0.05)
        generated[0] += 0.01
        row = handout.trained(1)
        assert row["wait_for_trainer_s"] > 0.045
        assert row["trainer_busy_s"] > 0.045
        assert row["overlap"] == pytest.approx(0.01 / row["trainer_busy_s"])
        assert handout.trained(1) is None, "published again"
        assert handout.trained(0) is None, "the weights of the start"
        assert await order(handout, 1, 1) == (1, 1), "it is still there"

    asyncio.run(scenario())


# --- publications on their way ----------------------------------------------------------------------------------------


class Run:
    """What publications pass through: `events` in their order; `stuck` is what takes until `go` is set."""

    def __init__(self):
        self.events, self.failures = [], []
        self.wants = self.overtakes = False
        self.taken, self.stuck, self.go = True, "", asyncio.Event()

    async def _do(self, *event):
        self.events.append(event)
        if self.stuck == event[:2]:
            await self.go.wait()

    def wants_weights(self, instead_of_batch):
        return self.wants

    def may_overtake(self):
        return self.overtakes

    async def swap(self, version, update_info, is_first):
        await self._do("swap", version, *(["first"] if is_first else []))
        if isinstance(self.taken, Exception):
            raise self.taken
        return self.taken

    async def evaluate_if_due(self, version):
        await self._do("evaluate", version)

    async def begin(self, version):
        await self._do("begin", version)

    def over(self, version):
        self.events.append(("over", version))

    def fail(self, error):
        self.failures.append(error)

    def take_events(self):
        events, self.events = self.events, []
        return events


async def publications_of(version=0):
    """A run whose engines serve `version`, by publication 1; None: engines are not up."""
    run, lock = Run(), asyncio.Lock()
    publications = Publications(lock, run)
    if version is not None:
        await publications.engines_are_up()
        publications.offer(1, version, {})
        await publications.finish()
        run.take_events()
    return publications, run, lock


def test_a_publication_passes_through_its_states_in_order():
    async def scenario():
        publications, run, lock = await publications_of(None)
        assert await publications.delivered(0, 0) is None
        assert publications.offer(1, 0, {}), "the trainer is up first"
        assert not publications.offer(1, 0, {}), "the same"
        await asyncio.sleep(0.01)
        assert (run.events, publications.is_up, await publications.told(1, 0)) == ([], False, False)
        run.stuck = "swap", 0
        await publications.engines_are_up()
        assert publications.is_up
        assert await publications.told(1, 60)
        await until(lambda: run.events)
        assert (await publications.delivered(0, 0), await publications.delivered(1, 0)) == (False, None)
        assert publications.served == -1
        run.stuck = "evaluate", 0
        run.go.set()
        run.go = asyncio.Event()
        assert await publications.delivered(1, 60) is True
        await until(lambda: len(run.events) == 2)
        assert (publications.served, lock.locked(), len(publications.under_way)) == (0, True, 1)
        run.go.set()
        await publications.finish()
        assert run.events == [("swap", 0, "first"), ("evaluate", 0), ("begin", 0), ("over", 0)]
        assert (lock.locked(), publications.under_way) == (False, set())

    asyncio.run(scenario())


def test_one_that_comes_while_an_evaluation_has_the_engines_is_told_after_it():
    async def scenario():
        publications, run, _ = await publications_of()
        run.stuck = "evaluate", 1
        publications.offer(2, 1, {})
        assert await publications.delivered(2, 60)
        publications.offer(3, 2, {})
        assert not await publications.told(3, 0.05)
        assert ("swap", 2) not in run.events
        run.go.set()
        await publications.finish()
        order = [event[0] + str(event[1]) for event in run.events]
        assert order == ["swap1", "evaluate1", "begin1", "over1", "swap2", "evaluate2", "begin2", "over2"]

    asyncio.run(scenario())


def test_one_that_may_overtake_is_swapped_at_once_and_evaluated_behind_the_other():
    """An evaluation lost its engines, and ends only with the weights that come next."""

    async def scenario():
        publications, run, lock = await publications_of()
        run.stuck = "evaluate", 1
        publications.offer(2, 1, {})
        assert await publications.delivered(2, 60)
        publications.offer(3, 2, {})
        await asyncio.sleep(0.01)
        run.overtakes = True
        assert await publications.delivered(3, 60)
        assert (publications.served, len(publications.under_way)) == (2, 2)
        assert ("evaluate", 2) not in run.events, "one at a time"
        run.go.set()
        await publications.finish()
        order = [event[0] + str(event[1]) for event in run.events]
        assert order == ["swap1", "evaluate1", "swap2", "over1", "evaluate2", "begin2", "over2"], "1 never begins"
        assert not lock.locked()

    asyncio.run(scenario())


def test_an_engine_that_dies_in_between_leaves_a_version_served_by_nobody_until_it_is_published_again():
    async def scenario():
        publications, run, _ = await publications_of()
        run.taken = False
        publications.offer(2, 1, {})
        assert await publications.delivered(2, 60) is False
        await publications.finish()
        assert publications.served == 1
        assert run.take_events() == [("swap", 1), ("evaluate", 1), ("begin", 1), ("over", 1)]
        run.taken = True
        publications.offer(3, 1, {})
        assert await publications.delivered(3, 60) is True
        await publications.finish()
        assert run.take_events() == [("swap", 1), ("over", 1)], "nothing of it is new"

    asyncio.run(scenario())


def test_an_update_that_fails_ends_the_run_and_lets_the_engines_go():
    async def scenario():
        publications, run, lock = await publications_of()
        run.taken = RuntimeError("an engine refused")
        publications.offer(2, 1, {})
        await publications.finish()
        assert run.failures == [run.taken]
        assert (lock.locked(), publications.served, await publications.delivered(2, 0)) == (False, 0, None)
        assert run.events[-1] == ("over", 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("where", ["swap", "evaluate", "waiting"])
def test_what_is_given_up_lets_the_engines_go(where):
    async def scenario():
        publications, run, lock = await publications_of()
        run.stuck = where, 1
        if where == "waiting":
            await lock.acquire()
        publications.offer(2, 1, {})
        await asyncio.sleep(0.01)
        publications.give_up()
        await publications.finish()
        assert (run.failures, run.events[-1]) == ([], ("over", 1))
        assert lock.locked() == (where == "waiting"), "who has them keeps them"
        if where == "waiting":
            lock.release()
            await asyncio.sleep(0.01)
            assert not lock.locked(), "nobody waits for them any more"
        assert ("begin", 1) not in run.events

    asyncio.run(scenario())


def test_ranks_are_asked_to_publish_again_where_nothing_is_on_its_way():
    async def scenario():
        publications, run, lock = await publications_of()
        assert not publications.ask_again(1, False), "nobody wants weights"
        run.wants = True
        async with lock:
            publications.offer(2, 1, {})
            assert not publications.ask_again(2, False), "they are on their way"
            assert not publications.asked_again(2)
        await publications.finish()
        assert publications.ask_again(2, False)
        run.wants = False
        assert publications.asked_again(2), "what was said stays said"
        assert not publications.asked_again(3)

    asyncio.run(scenario())


# --- evaluations due --------------------------------------------------------------------------------------------------


def due_of(**keys):
    return EvaluationsDue(EvalConfig(**({"interval": 2, "at_start": True, "at_end": True} | keys)))


def test_an_evaluation_holds_younger_checkpoints_until_it_is_done():
    due = due_of()
    due.published(1)
    assert not due.lost_by(2), "that version has none"
    due.published(2)
    assert [due.lost_by(step) for step in (1, 2, 3)] == [False, False, True], "a run that resumes from 2 evaluates it"
    due.over(2)
    assert due.lost_by(3), "another update, which overtook this one, may be evaluating it"
    due.done(2)
    due.over(2)
    assert not due.lost_by(3)
    due.published(2)
    assert (due.follows(2), due.lost_by(3)) == (False, False), "published again"


def test_one_that_is_due_while_another_runs_is_to_come_after_it():
    due = due_of(interval=1)
    due.published(1)
    due.published(2)
    due.done(1)
    due.over(1)
    assert [due.lost_by(step) for step in (2, 3)] == [False, True]
    due.done(2)
    due.over(2)
    assert not due.lost_by(3)


def test_a_stop_leaves_the_last_version_to_the_run_that_resumes_and_holds_nothing():
    due = due_of()
    due.published(2)
    due.stop(5)  # 4 is in training
    assert (due.follows(2), due.follows(4)) == (True, False)
    assert not due.lost_by(4), "a stop waits for no evaluation"
    due.published(4)
    due.over(4)
    assert due.to_come == {2}
    resumed = due_of()
    resumed.resume({2})
    assert (resumed.follows(2), resumed.follows(4)) == (False, True)


def test_a_run_that_goes_on_from_another_evaluates_what_it_begins_with():
    for at_start in (True, False):
        due = due_of(interval=10, at_start=at_start)
        due.resume(set(), first=7)
        assert [due.follows(version) for version in (0, 7, 8, 10)] == [False, at_start, False, True]


def test_the_end_is_evaluated_once():
    due = due_of()
    assert (due.follows_at_end(4), due.follows_at_end(5)) == (False, True), "4 is due anyway"
    due.done(5)
    assert not due.follows_at_end(5)


# --- the checkpoint's other half --------------------------------------------------------------------------------------


@pytest.fixture
def checkpoints(tmp_path):
    def staged(step):
        trainers = staging_dir(tmp_path / "run", step) / "trainer"
        trainers.mkdir(parents=True)
        (trainers / "shard").write_bytes(b"weights")

    made = Checkpointing(context_of(tmp_path / "run", "warm_start=none", role="orchestrator"))
    made.staged, made.held = staged, [True]
    yield made
    made.held[0] = False
    made.committer.thread.shutdown()


def saved(checkpoints, step):
    return json.loads((staging_dir(checkpoints.ctx.run_dir, step) / ORCHESTRATOR / "state.json").read_text())


def test_what_a_stop_may_save_is_held_and_no_more(checkpoints):
    for step in range(6):
        checkpoints.note(step, {"cursor": step}, is_awaited=step == 3)
    checkpoints.forget(-1)
    assert sorted(checkpoints.states) == [0, 1, 2, 3, 4, 5], "nothing is served yet"
    checkpoints.forget(2)
    assert sorted(checkpoints.states) == [2, 3, 4, 5]
    checkpoints.forget(5)
    assert sorted(checkpoints.states) == [3, 4, 5], "the trainer is still saving 3"


def test_a_save_while_the_next_publication_is_under_way_adds_the_state_of_its_own_step(checkpoints):
    checkpoints.note(2, {"cursor": 2}, is_awaited=True)
    checkpoints.note(3, {"cursor": 3})
    checkpoints.forget(3)  # version 3 is served before the trainer's half of 2 is on disk
    checkpoints.staged(2)
    checkpoints.trainer_saved(2, lambda: checkpoints.held[0], False)
    assert saved(checkpoints, 2) == {"cursor": 2}
    checkpoints.forget(3)
    assert sorted(checkpoints.states) == [3]


def test_a_checkpoint_that_the_trainer_skipped_is_made_up_for_by_the_next(checkpoints):
    for step in (2, 4, 6):
        checkpoints.note(step, {"cursor": step}, is_awaited=True)
    checkpoints.staged(4)
    checkpoints.trainer_saved(4, lambda: checkpoints.held[0], False)
    checkpoints.forget(6)
    assert sorted(checkpoints.states) == [6]


def test_a_commit_waits_for_what_holds_it_and_counts_once(checkpoints):
    async def scenario():
        checkpoints.note(1, {"cursor": 1}, is_awaited=True)
        checkpoints.staged(1)
        checkpoints.trainer_saved(1, lambda: checkpoints.held[0], False)
        assert await checkpoints.committed(1, 0.2) is None
        assert not step_dir(checkpoints.ctx.run_dir, 1).exists()
        checkpoints.forget(9)
        checkpoints.trainer_saved(1, lambda: True, False)  # the answer was lost; its state is forgotten
        checkpoints.held[0] = False
        assert await checkpoints.committed(1, 60) is not None
        assert latest_valid(checkpoints.ctx.run_dir, parts_of("rl"))[0] == 1
        assert checkpoints.load(1) == {"cursor": 1}
        assert await checkpoints.committed(2, 0) is None, "nobody asked for it"

    asyncio.run(scenario())
