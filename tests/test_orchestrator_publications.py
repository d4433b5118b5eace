"""Weights that nobody holds (weight_transport=nccl): who takes part in an update, and when they are published again."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_engine import generate, pool_of
from test_orchestrator_restarts import UPDATE, dead_server, until

from prl.config import compose
from prl.orchestrator.batching import EncodedStep
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.pool import NoWeights
from prl.orchestrator.loop import Orchestrator
from prl.planning.planner import make_plan
from prl.runtime.process.restarts import why_final
from prl.transport.batch import TrainBatch


def info(version):
    return {"type": "nccl", "version": version}


# --- the pool ---------------------------------------------------------------------------------------------------------


def test_a_lone_replica_serves_again_with_the_next_weights():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            await pool.init_weight_transfer({"verify_checksum": True})
            assert await pool.update_weights(1, info(1))
            pool.lose(0)
            assert not await pool.update_weights(2, info(2)), "nobody was there"
            job = asyncio.create_task(generate(pool))
            engine.log.clear()
            await pool.readmit(0, 60)
            await asyncio.sleep(0.05)
            assert engine.log == ["init_weight_transfer_engine"]
            assert (pool.starved, job.done()) == (True, False)
            assert await pool.update_weights(2, info(2))
            await asyncio.wait_for(job, 60)
            assert engine.log[1:6] == ["pause", *UPDATE, "resume"]
            assert (pool.starved, pool.returned) == (False, set())

    asyncio.run(scenario())


def test_updates_go_on_without_a_dead_replica_and_say_so():
    async def scenario():
        with dead_server() as url:
            async with pool_of(2, processes=[2, 1]) as (pool, (back, other)):
                await pool.update_weights(1, info(1))
                alive, pool.urls[0] = pool.urls[0], url
                update = asyncio.create_task(pool.update_weights(2, info(2)))  # nobody knows of the death yet
                await until(lambda: other.log.count("pause") == 2)
                await asyncio.sleep(0.1)
                assert len(other.loaded) == 1, "weights must wait until it is sure who takes part"
                pool.lose(0)
                assert await asyncio.wait_for(update, 60)
                pool.urls[0] = alive
                await pool.readmit(0, 60)
                assert pool.serving == [False, True]
                assert await pool.update_weights(3, info(3))
                assert pool.serving == [True, True]
                assert [taken["absent"] for taken in other.loaded] == [0, 2, 0]
                assert [(taken["version"], taken["absent"]) for taken in back.loaded] == [(1, 0), (3, 0)]

    asyncio.run(scenario())


@pytest.mark.parametrize("first", ["the word", "a failure of the dead", "a failure of another"])
def test_a_death_in_an_update_leaves_the_others_paused_until_the_next(first):
    async def scenario():
        async with pool_of(2) as (pool, (dying, other)):
            dying.stuck_at = other.stuck_at = UPDATE[2]  # the others hang, too
            update = asyncio.create_task(pool.update_weights(7, info(7)))
            await until(lambda: UPDATE[2] in dying.log and UPDATE[2] in other.log)
            if first != "the word":
                {"a failure of the dead": dying, "a failure of another": other}[first].stuck.set()
                await asyncio.sleep(0.1)
                assert not update.done(), "only the supervisor knows whether it died"
            pool.lose(0)
            assert await asyncio.wait_for(update, 60) is False
            assert (pool.starved, pool.wants_weights, pool.serving) == (True, True, [False, True])
            job = asyncio.create_task(generate(pool))
            other.stuck_at = ""
            again = asyncio.create_task(pool.update_weights(7, info(7)))
            await asyncio.sleep(0.1)
            if first != "a failure of another":
                assert other.log.count("pause") == 1, "it has not done with the last one"
                assert "resume" not in other.log
            other.stuck.set()  # the trainer has withdrawn
            assert await asyncio.wait_for(again, 60) is True
            await asyncio.wait_for(job, 60)
            assert (pool.starved, pool.wants_weights) == (False, False)
            assert other.loaded[-1]["absent"] == 1

    asyncio.run(scenario())


def test_a_failure_in_an_update_without_a_death_is_an_error(monkeypatch):
    monkeypatch.setattr("prl.orchestrator.engines.pool.NOTICE_S", 0.1)

    async def scenario():
        async with pool_of(2) as (pool, (_, other)):
            other.missing = 1
            with pytest.raises(EngineError, match=r"update_weights by 400: .*cannot be fetched"):
                await pool.update_weights(7, info(7))

    asyncio.run(scenario())


def test_a_replica_that_dies_once_more_waits_no_longer():
    async def scenario():
        async with pool_of(2) as (pool, _):
            await pool.update_weights(1, info(1))
            pool.lose(0)
            await pool.readmit(0, 60)
            assert pool.returned == {0}
            pool.lose(0)
            assert pool.returned == set()
            assert await pool.update_weights(2, info(2))
            assert pool.serving == [False, True]

    asyncio.run(scenario())


def test_engines_that_die_behind_the_last_weights_are_missed_only_if_none_is_left():
    async def scenario():
        async with pool_of(2) as (pool, _):
            await pool.update_weights(1, info(1))
            pool.lose(0)
            pool.expect_no_weights()
            await pool.readmit(0, 60)
            pool.lose(1)
            with pytest.raises(NoWeights, match="one or more died in the last update or after it"):
                await pool.readmit(1, 60)

    asyncio.run(scenario())


# --- the orchestrator -------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def orchestrator_of(count=1, transport="nccl", run_dir=Path("unused")):
    """One whose engines serve version 0, published once; `evaluated` holds the versions that were evaluated."""
    plan = make_plan(compose([f"weight_transport={transport}", "eval.interval=1", "eval.at_start=false"]))
    metrics = SimpleNamespace(log=lambda **row: None)
    orchestrator = Orchestrator(SimpleNamespace(plan=plan, resume_step=0, metrics=metrics, run_dir=run_dir))
    orchestrator.evaluated = []

    async def evaluate(version):
        orchestrator.evaluated.append(version)
        orchestrator.evaluations.done(version)

    async def set_version(version):
        orchestrator.runner.version = version

    async with pool_of(count) as (pool, engines):
        orchestrator.engines, orchestrator._evaluate = pool, evaluate
        orchestrator.runner = SimpleNamespace(
            version=0, lockstep=None, stats=SimpleNamespace(clock=SimpleNamespace(seconds=float))
        )
        orchestrator.producer = SimpleNamespace(set_version=set_version)
        await orchestrator.publications.engines_are_up()
        await deliver(orchestrator, 1, 0)
        yield orchestrator, pool, engines
        assert orchestrator.error is None


async def deliver(orchestrator, publication, version):
    await orchestrator.weights_published(publication, version, info(version))
    taken = await orchestrator.weights_delivered(publication, 60)
    await orchestrator.publications.finish()
    return taken


async def order(orchestrator, step, publications, timeout_s=0.05):
    body = await orchestrator.batch_for(step, 0, publications, timeout_s)
    if body is None:
        return None
    meta = TrainBatch.from_bytes(bytes(body)).meta
    return "stop" if meta["stop"] else "again" if meta["publish_again"] else "batch"


def batch(step):
    made = TrainBatch(step, [], 0, 0, {"stop": False, "publish_again": False, "checkpoint": False})
    return EncodedStep([made.to_message()], np.zeros(0))


def test_a_trainer_that_waits_publishes_again_for_an_engine_without_weights():
    async def scenario():
        async with orchestrator_of() as (orchestrator, pool, _):
            assert await order(orchestrator, 1, 1) is None
            pool.lose(0)
            assert await order(orchestrator, 1, 1) is None, "nobody to take weights yet"
            waiting = asyncio.create_task(order(orchestrator, 1, 1, timeout_s=60))
            await asyncio.sleep(0.05)
            await pool.readmit(0, 60)
            assert await asyncio.wait_for(waiting, 60) == "again"
            assert await deliver(orchestrator, 2, 0)
            assert pool.serving == [True]
            assert await order(orchestrator, 1, 2) is None
            assert orchestrator.evaluated == [], "the version is no new one"

    asyncio.run(scenario())


@pytest.mark.parametrize("then", ["batch", "stop"])
def test_all_ranks_are_told_the_same_at_the_same_point(then):
    async def scenario():
        async with orchestrator_of() as (orchestrator, pool, _):
            pool.lose(0)
            await pool.readmit(0, 60)
            assert await order(orchestrator, 1, 1) == "again"
            if then == "batch":
                await orchestrator.handout.add(1, batch(1))
            else:
                await orchestrator._stop_after_current()
            assert await order(orchestrator, 1, 1) == "again", "a rank that asks late"
            assert [await order(orchestrator, 1, 2) for _ in range(2)] == [then, then]

    asyncio.run(scenario())


def test_with_a_batch_at_hand_the_next_version_is_what_an_engine_gets():
    async def scenario():
        async with orchestrator_of(2) as (orchestrator, pool, (back, _)):
            pool.lose(0)
            await pool.readmit(0, 60)
            await orchestrator.handout.add(1, batch(1))
            assert [await order(orchestrator, 1, 1) for _ in range(2)] == ["batch", "batch"]
            assert await deliver(orchestrator, 2, 1)
            assert back.loaded[-1]["version"] == 1
            assert orchestrator.evaluated == [1]
            assert await order(orchestrator, 2, 2) is None

    asyncio.run(scenario())


def test_nobody_trains_while_all_engines_wait_for_weights():
    async def scenario():
        async with orchestrator_of() as (orchestrator, pool, _):
            await orchestrator.handout.add(1, batch(1))
            await orchestrator.handout.add(2, batch(2))
            assert await order(orchestrator, 1, 1) == "batch"
            pool.lose(0)
            await pool.readmit(0, 60)
            assert await order(orchestrator, 1, 1) == "batch", "as another rank was told"
            assert await deliver(orchestrator, 2, 0)
            pool.lose(0)
            await pool.readmit(0, 60)
            assert await order(orchestrator, 2, 2) == "again"

    asyncio.run(scenario())


def test_nothing_is_asked_for_while_weights_are_on_their_way():
    async def scenario():
        async with orchestrator_of(2) as (orchestrator, pool, _):
            pool.lose(0)
            async with orchestrator.engine_lock:  # an evaluation by the other one
                await orchestrator.weights_published(2, 1, info(1))
                await pool.readmit(0, 60)
                assert await order(orchestrator, 2, 2, timeout_s=0.3) is None
            assert await orchestrator.weights_delivered(2, 60)
            assert pool.serving == [True, True]
            await orchestrator.publications.finish()

    asyncio.run(scenario())


def test_a_publication_behind_an_evaluation_has_its_turn_after_it():
    """From then on engines have a limited time to come; an evaluation may take longer."""

    async def scenario():
        async with orchestrator_of() as (orchestrator, _, _):
            assert await orchestrator.turn_reached(1, 0)
            async with orchestrator.engine_lock:
                await orchestrator.weights_published(2, 1, info(1))
                assert not await orchestrator.turn_reached(2, 0.3)
            assert await orchestrator.turn_reached(2, 60)
            assert await orchestrator.weights_delivered(2, 60)
            await orchestrator.publications.finish()

    asyncio.run(scenario())


def test_an_update_that_finds_no_engine_is_delivered_to_nobody():
    async def scenario():
        async with orchestrator_of() as (orchestrator, pool, _):
            pool.lose(0)
            assert await deliver(orchestrator, 2, 1) is False
            assert orchestrator.publications.served == 1
            await pool.readmit(0, 60)
            orchestrator.evaluated.clear()
            assert await order(orchestrator, 2, 2) == "again"
            assert await deliver(orchestrator, 3, 1) is True
            assert orchestrator.evaluated == []

    asyncio.run(scenario())


def evaluate_with_stuck_first(orchestrator, pool, engine):
    """Evaluations ask an engine for one completion; that of version 1 gets none until `engine.go` is set."""

    async def evaluate(version):
        orchestrator.evaluated.append(version)
        if version == 1:
            engine.go.clear()
        await generate(pool, f"eval-{version}")
        orchestrator.evaluations.done(version)

    orchestrator._evaluate = evaluate


def test_an_evaluation_that_lost_its_only_engine_is_overtaken_by_the_weights():
    async def scenario():
        async with orchestrator_of() as (orchestrator, pool, (engine,)):
            evaluate_with_stuck_first(orchestrator, pool, engine)
            await orchestrator.weights_published(2, 1, info(1))
            await until(lambda: engine.held)
            await orchestrator.weights_published(3, 2, info(2))  # the trainer is ahead
            pool.lose(0)
            await asyncio.sleep(0.05)
            assert orchestrator.publications.served == 1
            engine.go.set()
            await pool.readmit(0, 60)
            assert await orchestrator.weights_delivered(3, 60)
            await asyncio.wait_for(orchestrator.publications.finish(), 60)
            assert not orchestrator.engine_lock.locked()
            assert (orchestrator.evaluated, orchestrator.runner.version) == ([1, 2], 2)

    asyncio.run(scenario())


def test_an_evaluation_that_lost_its_only_engine_does_not_keep_newer_weights_from_it():
    """The trainer holds the newest version only, and the engine that came back knows of the one before."""

    async def scenario():
        async with orchestrator_of(transport="tcp") as (orchestrator, pool, (engine,)):
            evaluate_with_stuck_first(orchestrator, pool, engine)
            await orchestrator.weights_published(2, 1, info(1) | {"type": "tcp"})
            await until(lambda: engine.held)
            await orchestrator.weights_published(3, 2, info(2) | {"type": "tcp"})
            engine.missing = 10**6  # of the version before
            pool.lose(0)
            engine.go.set()
            back = asyncio.create_task(pool.readmit(0, 60))
            await until(lambda: orchestrator.publications.served == 2)
            engine.missing = 0
            await asyncio.wait_for(back, 60)
            await asyncio.wait_for(orchestrator.publications.finish(), 60)
            assert not orchestrator.engine_lock.locked()
            assert (orchestrator.evaluated, orchestrator.runner.version) == ([1, 2], 2)

    asyncio.run(scenario())


def test_no_evaluation_is_dropped_when_several_updates_overtake_one_that_lost_its_engine():
    async def scenario():
        async with orchestrator_of(transport="tcp") as (orchestrator, pool, (engine,)):
            evaluate_with_stuck_first(orchestrator, pool, engine)
            await orchestrator.weights_published(2, 1, info(1) | {"type": "tcp"})
            await until(lambda: engine.held)
            engine.missing = 10**6
            pool.lose(0)
            engine.go.set()
            back = asyncio.create_task(pool.readmit(0, 60))
            for publication in (3, 4):
                version = publication - 1
                await orchestrator.weights_published(publication, version, info(version) | {"type": "tcp"})
                await until(lambda version=version: orchestrator.publications.served == version)
            engine.missing = 0
            await asyncio.wait_for(back, 60)
            await asyncio.wait_for(orchestrator.publications.finish(), 60)
            assert (orchestrator.evaluated, orchestrator.runner.version) == ([1, 2, 3], 3)
            assert not orchestrator.evaluations.to_come

    asyncio.run(scenario())


def test_a_trainer_that_has_ended_serves_no_weights_by_tcp():
    async def scenario():
        async with pool_of(1) as (pool, (engine,)):
            await pool.update_weights(1, info(1) | {"type": "tcp"})
            engine.missing = 10**6
            pool.lose(0)
            back = asyncio.create_task(pool.readmit(0, 90))
            await asyncio.sleep(0.5)
            pool.expect_no_weights()
            with pytest.raises(NoWeights):
                await asyncio.wait_for(back, 60)

    asyncio.run(scenario())


# --- the supervisor ---------------------------------------------------------------------------------------------------


def test_engines_by_nccl_are_started_again_and_those_by_ipc_are_not():
    assert why_final(compose(["weight_transport=nccl"]), "inference") is None
    assert "ipc" in why_final(compose(["weight_transport=ipc", "deployment=colocated"]), "inference")
