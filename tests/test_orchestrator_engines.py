"""The client of the inference engines and the barrier of synchronous runs, against a small engine over real HTTP."""

import asyncio
import base64
import io

import aiohttp
import numpy as np
import pytest
from fake_engine import generate, pool_of

from prl.config.schema import SamplingConfig
from prl.orchestrator.engines import pool as engines
from prl.orchestrator.engines.answers import LARGE, EngineError
from prl.orchestrator.engines.lockstep import Lockstep
from prl.orchestrator.engines.turnstile import Turnstile
from prl.orchestrator.rollouts.env_client import EnvClient, _Wanted
from prl.orchestrator.rollouts.rollout import RolloutFailed


def encoded(routed):
    file = io.BytesIO()
    np.save(file, routed)
    return base64.b64encode(file.getvalue()).decode()


# --- requests and answers ---------------------------------------------------------------------------------------------


def test_a_request_carries_everything_that_fixes_its_sample():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            await pool.wait_healthy(60)
            result = await generate(pool)
            return result, engine.bodies[0]

    result, body = asyncio.run(scenario())
    assert (result.token_ids, [*result.logprobs], [*result.versions]) == ([9, 9], [-0.25] * 2, [3, 3])
    assert result.finish_reason == "stop"
    assert result.routed_experts is None
    assert (body["token_ids"], body["cache_salt"], body["request_id"]) == ([1, 2, 9], "train-3", "r")
    assert body["sampling_params"] == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 7, "seed": 11,
        "stop_token_ids": [256], "logprobs": 0, "flat_logprobs": True, "detokenize": False,
        "extra_args": {"frames": True},
    }  # fmt: skip


def test_an_answer_may_come_in_frames_with_the_experts_of_new_tokens_alone():
    routed = np.arange(8, dtype=np.uint16).reshape(2, 2, 2) + 300

    async def scenario(start):
        async with pool_of(return_routed_experts=True) as (pool, (engine,)):
            engine.framed = True
            engine.choice = {
                "token_ids": np.array([9, 9], np.int32),
                "token_logprobs": np.array([-0.5, -0.75], np.float32),
                "routed_experts": routed,
                "routing_start": start,
            }
            answer = await pool.generate([1, 2, 9], 7, 11, "s", SamplingConfig(), "r", routing_start=start)
            return answer, engine.bodies[0]["sampling_params"]["extra_args"]

    answer, asked = asyncio.run(scenario(2))
    assert asked == {"frames": True, "routing_start": 2}
    assert (answer.token_ids, [*answer.logprobs], [*answer.versions]) == ([9, 9], [-0.5, -0.75], [3, 3])
    assert (answer.routing_start, answer.routed_experts.dtype) == (2, np.uint16)
    np.testing.assert_array_equal(answer.routed_experts, routed)
    with pytest.raises(EngineError, match="2 rows of routed experts for 3 forwarded tokens"):
        asyncio.run(scenario(1))


def test_a_large_answer_comes_whole():
    count = 20_000
    ids, logprobs = np.arange(count - 2, dtype=np.int32), np.linspace(-1, 0, count - 2, dtype=np.float32)
    routed = np.arange(count * 64, dtype=np.int64).astype(np.uint8).reshape(count, 32, 2)

    async def scenario():
        async with pool_of(return_routed_experts=True) as (pool, (engine,)):
            engine.framed = True
            engine.choice = {"token_ids": ids, "token_logprobs": logprobs, "routed_experts": routed}
            return await generate(pool)

    assert routed.nbytes > LARGE
    answer = asyncio.run(scenario())
    assert answer.token_ids == ids.tolist()
    np.testing.assert_array_equal(answer.logprobs, logprobs)
    np.testing.assert_array_equal(answer.routed_experts, routed)


class Turns:
    """Counts turns of the event loop. `note` remembers in which one something was done; `most`: how often in one."""

    def __init__(self):
        self.now, self.noted = 0, []

    async def count(self):
        while True:
            await asyncio.sleep(0)
            self.now += 1

    def note(self):
        self.noted.append(self.now)

    @property
    def most(self):
        return max(self.noted.count(turn) for turn in self.noted)


def test_a_burst_of_requests_is_sent_few_in_a_turn_of_the_event_loop_and_answers_are_read_one_in_each(monkeypatch):
    """A long answer takes milliseconds: several in one turn would hold all others up for as long as all of them."""
    sent, read_in, parse = Turns(), Turns(), engines.parse_choice

    async def answer(body, replica):
        sent.note()
        await asyncio.sleep(0.05)
        choice = {"token_ids": [9], "token_logprobs": [-0.5], "finish_reason": "stop"}
        return 0, {"choices": [choice]}

    def parse_and_note(*args):
        read_in.note()
        return parse(*args)

    async def scenario():
        async with pool_of() as (pool, _):
            monkeypatch.setattr(pool, "_ask_replica", answer)
            counting = [asyncio.create_task(turns.count()) for turns in (sent, read_in)]
            await asyncio.gather(*(generate(pool) for _ in range(40)))
            for task in counting:
                task.cancel()

    monkeypatch.setattr(engines, "parse_choice", parse_and_note)
    asyncio.run(scenario())
    assert len(sent.noted) == len(read_in.noted) == 40
    assert (sent.most, read_in.most) == (16, 1)


def test_a_burst_of_rollouts_goes_on_few_in_a_turn_of_the_event_loop(monkeypatch):
    turns = Turns()

    async def scenario():
        env = EnvClient("a", "http://nowhere", "key")
        env.connected.set()

        async def send(message):
            if message["op"] == "start":
                asyncio.get_running_loop().call_later(0.05, env.inbox[message["rollout"]].put_nowait, {"op": "reply"})

        async def answer(messages, keep, tools):
            turns.note()
            raise RolloutFailed("that was all")

        monkeypatch.setattr(env, "_send", send)
        monkeypatch.setattr("prl.orchestrator.rollouts.env_client._read", lambda message, said: _Wanted([], 0, []))
        counting = asyncio.create_task(turns.count())
        await asyncio.gather(*(env.run("train", i, answer) for i in range(40)), return_exceptions=True)
        counting.cancel()

    asyncio.run(scenario())
    assert len(turns.noted) == 40
    assert turns.most <= 16  # fewer where the answers came in several turns


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_burst_goes_on_in_order_and_a_few_in_each_turn_of_the_event_loop(at_once):
    async def scenario():
        turnstile, turn, came = Turnstile(at_once), [0], []

        async def one(index):
            await turnstile.through()
            came.append((turn[0], index))

        burst = [asyncio.create_task(one(index)) for index in range(8)]
        while not all(task.done() for task in burst):
            await asyncio.sleep(0)
            turn[0] += 1
        await asyncio.wait_for(asyncio.gather(*(one(index) for index in range(8, 16))), 60)
        return came

    came = asyncio.run(scenario())
    assert [index for _, index in came] == list(range(16))
    turns = [turn for turn, index in came if index < 8]
    assert [turns.count(turn) for turn in dict.fromkeys(turns)] == [at_once] * (8 // at_once) + [8 % at_once] * (
        8 % at_once > 0
    )


def test_logprobs_may_come_as_numbers():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.choice = {"logprobs": None, "token_logprobs": [-0.5, -0.75]}
            return await generate(pool)

    assert [*asyncio.run(scenario()).logprobs] == [-0.5, -0.75]


def test_versions_change_within_an_answer_and_routing_is_decoded():
    routed = np.arange(2 * 4, dtype=np.uint8).reshape(4, 2, 1)

    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.choice = {
                "routed_experts": encoded(routed),
                "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}],
                "finish_reason": "length",
            }
            return await generate(pool)

    result = asyncio.run(scenario())
    assert [*result.versions] == [3, 4]
    np.testing.assert_array_equal(result.routed_experts, routed)


@pytest.mark.parametrize(("rows", "found"), [(None, "no"), (3, "3 rows of"), (5, "5 rows of")])
def test_routing_that_does_not_fit_the_tokens_is_an_error(rows, found):
    """Three prompt tokens and two sampled: four were forwarded."""

    async def scenario():
        async with pool_of(return_routed_experts=True) as (pool, (engine,)):
            engine.choice = {"routed_experts": None if rows is None else encoded(np.zeros((rows, 2, 1), np.uint8))}
            with pytest.raises(EngineError, match=f"returned {found} routed experts for 4 forwarded tokens"):
                await generate(pool)
            engine.choice = {"routed_experts": encoded(np.zeros((4, 2, 1), np.uint8))}
            fitting = await generate(pool)
            engine.choice = {"token_ids": [], "logprobs": None, "routed_experts": None, "finish_reason": "abort"}
            return fitting, await generate(pool)

    fitting, aborted = asyncio.run(scenario())
    assert fitting.routed_experts.shape == (4, 2, 1)
    assert aborted.routed_experts is None


def test_routing_that_was_never_recorded_is_an_error():
    async def scenario():
        async with pool_of(return_routed_experts=True) as (pool, (engine,)):
            engine.choice = {"routed_experts": encoded(np.zeros((4, 3, 2), np.uint8))}
            with pytest.raises(EngineError, match="do not record the routing"):
                await generate(pool)
            engine.choice = {"routed_experts": encoded(np.tile(np.array([0, 1], np.uint16), (4, 3, 1)))}
            return await generate(pool)

    assert asyncio.run(scenario()).routed_experts.shape == (4, 3, 2)


def test_tokens_without_a_label_count_as_old_as_they_can_be():
    """Those of the version that was served when the request was sent, whatever came before the answer."""

    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.choice = {"weight_versions": None}
            await pool.update_weights(5, {})
            engine.go.clear()
            job = asyncio.create_task(generate(pool))
            while not engine.held:
                await asyncio.sleep(0.01)
            await pool.update_weights(6, {})
            return [*(await job).versions], [*(await generate(pool)).versions]

    assert asyncio.run(scenario()) == ([5, 5], [6, 6])


def test_waiting_for_health_outlasts_engines_that_keep_silent(monkeypatch):
    """vLLM listens long before it answers."""
    monkeypatch.setattr(engines, "HEALTH_TIMEOUT", aiohttp.ClientTimeout(total=0.1))

    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.silent = 2
            await pool.wait_healthy(60)
            return engine.silent

    assert asyncio.run(scenario()) == 0


@pytest.mark.parametrize(
    ("choice", "refuse", "message"),
    [
        ({"logprobs": None}, set(), "2 tokens but 0 logprobs"),
        ({"token_logprobs": [-0.5]}, set(), "2 tokens but 1 logprobs"),
        ({}, {"r"}, "it answered /inference/v1/generate by 400: .*too long"),
    ],
)
def test_bad_answers_are_engine_errors(choice, refuse, message):
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.choice, engine.refuse = choice, refuse
            with pytest.raises(EngineError, match=message):
                await generate(pool)
            assert pool.in_flight == [0]

    asyncio.run(scenario())


def test_an_engine_that_is_gone_or_slow_is_an_engine_error(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_S", 0.01)

    async def scenario():
        async with pool_of(request_timeout_s=0.2) as (pool, (engine,)):
            engine.go.clear()
            with pytest.raises(EngineError, match=r"http://\S+: it did not answer in time \(asked for /inf"):
                await generate(pool)
            with pytest.raises(EngineError, match="it answered /reset_prefix_cache by 500: cannot"):
                await pool.everywhere("/reset_prefix_cache")
            pool.urls = ["http://127.0.0.1:9"]
            with pytest.raises(EngineError, match=r"^http://127.0.0.1:9: nobody listens there \(asked for"):
                await generate(pool)
            with pytest.raises(EngineError, match="load"):
                await pool.queued(0)
            with pytest.raises(EngineError, match="not ready after"):
                await pool.wait_healthy(0.1)

    asyncio.run(scenario())


def test_requests_go_to_the_least_busy_replica():
    async def scenario():
        async with pool_of(3) as (pool, engines):
            for engine in engines:
                engine.go.clear()
            jobs = [asyncio.create_task(generate(pool, f"r{i}")) for i in range(7)]
            while sum(len(e.held) for e in engines) < 7:
                await asyncio.sleep(0.01)
            assert sorted(pool.in_flight) == sorted(len(e.held) for e in engines) == [2, 2, 3]
            for engine in engines:
                engine.go.set()
            await asyncio.gather(*jobs)
            assert pool.in_flight == [0, 0, 0]

    asyncio.run(scenario())


# --- the barrier ------------------------------------------------------------------------------------------------------


async def converse(lockstep, pool, name, turns, delay_s=0.0):
    """A rollout of so many turns, as the runner does it."""
    try:
        for turn in range(turns):
            await asyncio.sleep(delay_s)
            request_id = f"{name}-{turn}"
            await lockstep.request(request_id, lambda replica, r=request_id: generate(pool, r, replica))
    finally:
        lockstep.leave()


def start(lockstep, pool, name, turns, delay_s=0.0):
    lockstep.enter()
    return asyncio.create_task(converse(lockstep, pool, name, turns, delay_s))


def admitted(engine):
    return [entry for entry in engine.log if isinstance(entry, list)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_are_sent_in_the_same_sets_whatever_the_timing(replicas):
    async def scenario(delays):
        async with pool_of(replicas) as (pool, engines):
            lockstep = Lockstep(pool)
            turns = {"a": 3, "b": 1, "c": 2}
            jobs = [start(lockstep, pool, n, turns[n], delay_s) for n, delay_s in zip(turns, delays, strict=True)]
            await asyncio.wait_for(asyncio.gather(*jobs), 60)
            assert lockstep.live == 0
            assert all(engine.go.is_set() for engine in engines)
            return [admitted(engine) for engine in engines]

    sets = asyncio.run(scenario([0.0, 0.05, 0.1]))
    assert sets == asyncio.run(scenario([0.08, 0.0, 0.02]))
    if replicas == 1:
        assert sets == [[["a-0", "b-0", "c-0"], ["a-1", "c-1"], ["a-2"]]]
    else:
        assert sets == [[["a-0", "c-0"], ["a-1"], ["a-2"]], [["b-0"], ["c-1"]]]


def test_nothing_is_sent_before_all_wait():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            lockstep = Lockstep(pool)
            lockstep.enter()  # somebody who is not yet asking
            job = start(lockstep, pool, "a", 1)
            await asyncio.sleep(0.1)
            assert engine.log == []
            lockstep.leave()
            await asyncio.wait_for(job, 60)
            assert engine.log == ["pause", "resume", ["a-0"]]

    asyncio.run(scenario())


def test_a_refused_request_fails_alone():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.refuse = {"b-0"}
            lockstep = Lockstep(pool)
            jobs = [start(lockstep, pool, name, 2) for name in "abc"]
            results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
            assert [type(r) for r in results] == [type(None), EngineError, type(None)]
            assert admitted(engine) == [["a-0", "c-0"], ["a-1", "c-1"]]

    asyncio.run(scenario())


def test_a_rollout_cancelled_while_it_waits_holds_nobody_up():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            lockstep = Lockstep(pool)
            doomed = start(lockstep, pool, "a", 1)
            lockstep.enter()  # b, who asks later
            await asyncio.sleep(0.02)
            doomed.cancel()
            await asyncio.wait_for(converse(lockstep, pool, "b", 2), 60)
            assert admitted(engine) == [["b-0"], ["b-1"]]
            assert lockstep.live == 0

    asyncio.run(scenario())


def test_requests_that_come_while_a_set_runs_are_sent_even_if_that_set_dies():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            lockstep = Lockstep(pool)
            hold = asyncio.Event()

            async def control(route, body=None):
                await hold.wait()

            pool.everywhere = control
            first = start(lockstep, pool, "a", 1)
            await asyncio.sleep(0.02)
            first.cancel()
            second = start(lockstep, pool, "b", 1)
            await asyncio.sleep(0.02)
            hold.set()
            await asyncio.wait_for(second, 60)
            assert engine.bodies[-1]["request_id"] == "b-0"

    asyncio.run(scenario())


def test_an_engine_that_goes_away_fails_all_that_wait(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_S", 0.01)

    async def scenario():
        async with pool_of() as (pool, _):
            pool.urls = ["http://127.0.0.1:9"]
            lockstep = Lockstep(pool)
            jobs = [start(lockstep, pool, name, 1) for name in "ab"]
            results = await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 60)
            assert all(isinstance(r, (EngineError, aiohttp.ClientError)) for r in results)
            assert lockstep.live == 0

    asyncio.run(scenario())
