"""Answers of engines that get lost on their way: what was done is done again, or the run ends by the right name."""

import asyncio

import pytest
from fake_engine import generate, pool_of

from prl.orchestrator.engines import pool as engines
from prl.orchestrator.engines.answers import EngineError
from prl.runtime.process.failures import classify

UPDATE = ["pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
FILES = {"type": "filesystem", "path": "/weights"}


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_S", 0.1)  # nobody says that the engine had died


@pytest.mark.parametrize("route", UPDATE)
def test_an_update_begins_anew_where_an_answer_is_lost(route):
    async def scenario():
        async with pool_of(2) as (pool, (first, _)):
            first.lost = {f"/{route}"}
            assert await pool.update_weights(4, FILES)
            assert pool.version == 4
            told = [a for a, b in zip(first.log, [*first.log[1:], None], strict=True) if a != b]
            assert told[-4:] == UPDATE[1:]
            assert first.go.is_set()
            assert not first.lost
            assert pool.retried == 1
            assert (await generate(pool)).token_ids

    asyncio.run(scenario())


def test_a_completion_is_asked_for_again():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.lost = {"/inference/v1/generate"}
            assert (await generate(pool)).token_ids == [9, 9]
            assert len(engine.bodies) == 2

    asyncio.run(scenario())


def test_weights_that_nobody_holds_are_not_asked_for_twice():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.lost = {"/update_weights"}
            with pytest.raises(EngineError, match="hung up before it had answered") as caught:
                await pool.update_weights(4, {"type": "ipc"})
            assert engine.log.count("update_weights") == 1
            return caught.value

    error = asyncio.run(scenario())
    record = {"type": type(error).__name__, "message": str(error)}
    assert classify("orchestrator", 1, record, (), 0) == "collective"  # which SLURM tries again
    assert classify("env", 1, record, (), 0) == "env"
