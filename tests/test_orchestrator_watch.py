"""The looks at the engines' metrics, over real HTTP, and the requests that come to nothing, counted."""

import asyncio

import pytest
from fake_engine import pool_of
from tiny import byte_tokenizer

from prl.config import compose
from prl.config.schema import ConcurrencyConfig
from prl.envs.protocol import Score
from prl.models.text.chat import ChatRenderer
from prl.orchestrator.engines import pool as engines_module
from prl.orchestrator.engines.concurrency import EngineLoad, Limiter, start_limit
from prl.orchestrator.engines.watch import EngineWatch, parse_loads
from prl.orchestrator.rollouts.rollout import Rollout
from prl.orchestrator.rollouts.runner import RolloutRunner
from prl.orchestrator.rollouts.tasks import TaskChoice

IDLE, BUSY = (1, 0, 0.1, 0), (30, 0, 0.9, 0)


def metrics_text(*engines):
    """As prometheus_client writes it: families one after another, more labels, more names that begin alike."""
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
    lines = []
    for column, name in enumerate(names):
        lines += [f"# HELP vllm:{name} what it is", f"# TYPE vllm:{name} gauge"]
        lines += [
            f'vllm:{name}{{engine="{i}",model_name="a}}b"}} {float(load[column])}' for i, load in enumerate(engines)
        ]
        lines += [f'vllm:{name}_by_reason{{engine="0",model_name="m",reason="capacity"}} 77.0']
        lines += [f'vllm:{name.removesuffix("_total")}_created{{engine="0",model_name="m"}} 1.7e+09']
    return "\n".join([*lines, 'python_info{version="3.11"} 1.0', ""])


@pytest.mark.parametrize("engines", [[(3, 4, 0.25, 5)], [(3, 4, 0.25, 5), (1, 0, 1e-3, 2e6)]])
def test_metrics_of_every_engine_are_read(engines):
    assert parse_loads(metrics_text(*engines)) == {str(i): EngineLoad(*map(float, e)) for i, e in enumerate(engines)}


@pytest.mark.parametrize("text", ["", "no metrics", metrics_text(BUSY).replace("kv_cache_usage", "gpu_cache_usage")])
def test_metrics_without_our_names_are_refused(text):
    with pytest.raises(ValueError, match="kv_cache_usage_perc"):
        parse_loads(text)


def watch_of(pool, mode="adaptive", **keys):
    concurrency = ConcurrencyConfig(mode=mode, **{"start": 100 if mode == "adaptive" else None, **keys})
    config = pool.config.model_copy(update={"concurrency": concurrency})
    limiter = Limiter(start_limit(config, len(pool.decoding)))
    limiter.in_flight = limiter.peak = 100
    return EngineWatch(pool, limiter, config)


def test_looks_move_the_limit_and_are_reported():
    async def scenario():
        async with pool_of(2) as (pool, (first, second)):
            watch = watch_of(pool)
            rows = []
            looks = [(IDLE, BUSY), ((4, 1, 0.99, 2), BUSY)]
            for texts in looks:
                first.metrics, second.metrics = map(metrics_text, texts)
                await watch.look()
                rows.append(watch.row())
            for first.metrics in (metrics_text(BUSY, IDLE), metrics_text(IDLE, (5, 2, 0.2, 7))):
                await watch.look()
            return [*rows, watch.row(), watch.row()]

    one, two, both, none = asyncio.run(scenario())
    assert one == {
        "concurrency_limit": 100, "missed_looks": 0, "kv_cache_usage": 0.9, "requests_running": 31,
        "requests_waiting": 0, "preemptions": 0,
    }  # fmt: skip
    assert (two["concurrency_limit"], two["preemptions"], two["requests_waiting"]) == (80, 2, 1)
    assert (both["requests_running"], both["requests_waiting"]) == (((30 + 1 + 30) + (1 + 5 + 30)) / 2, 1)
    assert none == {"concurrency_limit": both["concurrency_limit"], "missed_looks": 0, "preemptions": 0}


def test_a_fixed_limit_is_reported_and_stays():
    async def scenario():
        async with pool_of(1) as (pool, (engine,)):
            watch = watch_of(pool, mode="fixed")
            for preemptions in (0, 50):
                engine.metrics = metrics_text((9, 99, 1.0, preemptions))
                await watch.look()
            return watch.row()

    row = asyncio.run(scenario())
    assert (row["concurrency_limit"], row["preemptions"], row["kv_cache_usage"]) == (256, 50, 1.0)


def test_without_an_answer_from_every_engine_nothing_changes(monkeypatch):
    monkeypatch.setattr(engines_module, "HEALTH_TIMEOUT", engines_module.aiohttp.ClientTimeout(total=0.1))

    async def scenario():
        async with pool_of(2) as (pool, (first, second)):
            watch = watch_of(pool)
            full = metrics_text((9, 99, 1.0, 0))
            first.metrics = second.metrics = full
            urls = list(pool.urls)
            for url, text in ((urls[1], None), (urls[1], "garbage"), ("http://127.0.0.1:9", full)):
                pool.urls[1], second.metrics = url, text
                await watch.look()
            with_failures = watch.row()
            pool.lose(1)  # the supervisor started it again: the others decide
            await watch.look()
            return with_failures, watch.row()

    failed, after = asyncio.run(scenario())
    assert failed == {"concurrency_limit": 100, "missed_looks": 3, "preemptions": 0}
    assert (after["concurrency_limit"], after["requests_running"], after["missed_looks"]) == (95, 9, 3)


def test_engines_that_stand_still_are_not_looked_at():
    async def scenario():
        async with pool_of(1) as (pool, (engine,)):
            watch = watch_of(pool)
            engine.metrics = metrics_text(BUSY)
            await watch.look()
            engine.metrics = metrics_text((0, 500, 1.0, 30))  # a sleep preempts what runs
            await pool.sleep()
            await watch.look()
            async with pool.updating:
                await watch.look()
            await pool.update_weights(1, {"type": "filesystem"}, asleep=True)
            engine.metrics = metrics_text((30, 0, 0.9, 31))
            await watch.look()
            slept = watch.row()
            engine.metrics = metrics_text((30, 0, 0.9, 32))
            await watch.look()
            engine.metrics = metrics_text((30, 0, 0.9, 3))  # started again
            await watch.look()
            return slept, watch.row()

    slept, awake = asyncio.run(scenario())
    assert (slept["concurrency_limit"], slept["requests_running"], slept["preemptions"]) == (100, 30, 0)
    assert awake["preemptions"] == 1 + 3


def test_a_look_during_which_an_update_began_is_dropped():
    async def scenario():
        async with pool_of(1) as (pool, (engine,)):
            watch = watch_of(pool)
            engine.metrics = metrics_text((9, 99, 1.0, 9))
            scrape = pool.scrape

            async def slowly(index):
                text = await scrape(index)
                await pool.update_weights(1, {"type": "filesystem"})
                return text

            pool.scrape = slowly
            await watch.look()
            return watch.row()

    assert "kv_cache_usage" not in asyncio.run(scenario())


def test_following_looks_again_and_again():
    async def scenario():
        async with pool_of(1) as (pool, (engine,)):
            watch = watch_of(pool, interval_s=0.01)
            engine.metrics = None
            following = asyncio.create_task(watch.follow())
            while watch.missed < 3:
                await asyncio.sleep(0.01)
            engine.metrics = metrics_text((9, 9, 0.99, 0))
            while watch.limiter.limit == 100:
                await asyncio.sleep(0.01)
            following.cancel()

    asyncio.run(asyncio.wait_for(scenario(), 60))


# --- requests that come to nothing ------------------------------------------------------------------------------------


class OneReply:
    """An environment that asks once and rewards."""

    connected = asyncio.Event()
    connected.set()

    async def run(self, split, index, answer):
        await answer([{"role": "user", "content": "hi"}], None, [])
        return "task", Score(1.0, {})


@pytest.fixture(scope="module")
def renderer(tmp_path_factory):
    return ChatRenderer(byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def test_aborted_requests_and_cancelled_rollouts_are_counted(renderer):
    async def scenario():
        config = compose(["warm_start=none", "env.rollout_timeout_s=0.3"])
        async with pool_of(1) as (pool, (engine,)):
            runner = RolloutRunner(config, pool, {"a": OneReply()}, renderer, None)

            async def rollouts(count):
                names = [f"r{i}" for i in range(count)]
                jobs = [runner.start_rollout(TaskChoice("a", 0), "train", n, config.inference.sampling) for n in names]
                return [isinstance(job, Rollout) for job in await asyncio.gather(*jobs)]

            assert await rollouts(2) == [True, True]
            assert (pool.aborted, runner.stats.cancelled) == (0, 0)
            engine.choice = {"finish_reason": "abort"}  # in the middle of a reply
            assert await rollouts(3) == [False] * 3
            assert (pool.aborted, runner.stats.cancelled) == (3, 0)
            engine.choice = {"finish_reason": "abort", "token_ids": [], "logprobs": None}
            assert await rollouts(1) == [False]
            engine.go.clear()
            assert await rollouts(2) == [False, False]
            assert (pool.aborted, runner.stats.cancelled) == (6, 2)
            return runner.stats.failures

    assert asyncio.run(scenario()) == 6
