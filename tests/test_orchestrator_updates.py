"""Updates of engines' weights, as the orchestrator asks for them, step by step."""

import asyncio
import contextlib

import pytest
from fake_engine import generate, pool_of

from prl.config.errors import PassingError
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.requests import PAUSE

UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]
NEAR, PAUSED = "prefetch_weights", PAUSE.removeprefix("/")


def test_a_weight_update_goes_to_all_replicas_in_order():
    async def scenario():
        async with pool_of(2) as (pool, engines):
            await pool.update_weights(4, {"type": "filesystem"})
            return [engine.log for engine in engines]

    order = ["prefetch_weights", "pause", "start_weight_update", "update_weights", "finish_weight_update", "resume"]
    assert asyncio.run(scenario()) == [order, order]


def test_engines_go_on_while_weights_come_near_and_one_that_cannot_fetch_them_does_so_in_the_update():
    async def scenario():
        async with pool_of(2) as (pool, (one, other)):
            one.stuck_at, other.unknown = "prefetch_weights", "prefetch_weights"
            update = asyncio.create_task(pool.update_weights(4, {"type": "tcp"}))
            while "prefetch_weights" not in one.log:
                await asyncio.sleep(0.01)
            assert not pool.standing_still
            await generate(pool, "meanwhile")
            one.stuck.set()
            assert await update
            assert one.log[-5:] == other.log[-5:] == ["pause", *UPDATE, "resume"]
            assert list(pool.clock.seconds) == ["pause", *UPDATE, "resume"], "nobody has fetched it before"
            one.stuck_at = None
            assert await pool.update_weights(5, {"type": "tcp"})
            row = pool.clock.row()
            assert list(pool.clock.seconds) == ["prefetch_weights", "pause", *UPDATE, "resume"]
            assert 0 < row["engines_paused_s"] < row["weight_update_s"]

    asyncio.run(scenario())


@pytest.mark.parametrize("kind", ["nccl", "ipc", "lora"])
def test_what_nobody_holds_is_not_fetched_ahead(kind):
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            with contextlib.suppress(KeyError):  # an adapter has a path
                await pool.update_weights(4, {"type": kind})
            assert "prefetch_weights" not in engine.log

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("level", "asleep", "expected"),
    [
        (1, False, [NEAR, PAUSED, *UPDATE, "resume"]),
        (1, True, [NEAR, "wake_up", PAUSED, *UPDATE, "resume"]),
        (2, True, [NEAR, "wake_up?tags=weights", PAUSED, *UPDATE, "wake_up?tags=kv_cache", "resume"]),
    ],
    ids=["awake", "level 1", "level 2"],
)
def test_who_slept_without_weights_has_new_ones_before_it_may_generate(level, asleep, expected):
    async def update():
        async with pool_of(2, sleep_level=level) as (pool, engines):
            await pool.sleep()
            await pool.update_weights(3, {"type": "filesystem"}, asleep=asleep)
            return [engine.asked for engine in engines]

    for asked in asyncio.run(update()):
        assert asked == [f"sleep?level={level}&mode=keep", *expected]


def test_weights_that_somebody_removed_are_told(tmp_path):
    """They come near no more, and the update finds nothing."""

    async def scenario(path):
        async with pool_of() as (pool, (engine,)):
            engine.missing, engine.unknown = 9, "prefetch_weights"
            await pool.update_weights(4, {"type": "filesystem", "path": str(path), "version": 4})

    with pytest.raises(EngineError, match="the weights cannot be fetched"):
        asyncio.run(scenario(tmp_path))
    with pytest.raises(PassingError, match="version 4 are gone") as told:
        asyncio.run(scenario(tmp_path / "step_4"))
    assert told.value.where == str(tmp_path / "step_4")
