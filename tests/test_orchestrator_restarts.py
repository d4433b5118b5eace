"""Engines that die and come back: who answers their requests, and which weights they have before they serve again."""

import asyncio
import contextlib
import json
import socket
from pathlib import Path

import pytest
import torch
from aiohttp import web
from fake_engine import generate, pool_of
from inference_server import running_server
from weight_updates import published

from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.checkpoints.writing import hf_tensors
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.restarts import INTERVAL_S, follow_restarts
from prl.transport.weights import FilesystemPublisher

UPDATE = ["start_weight_update", "update_weights", "finish_weight_update"]


async def until(condition, timeout_s=60):
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def dead_server():
    """The port of an engine that is being restarted: connections are neither refused nor answered."""
    with socket.create_server(("127.0.0.1", 0)) as leased:
        yield f"http://127.0.0.1:{leased.getsockname()[1]}"


def test_requests_of_a_dead_replica_are_answered_by_another():
    async def scenario():
        with dead_server() as url:
            async with pool_of(2) as (pool, (_, other)):
                pool.urls[0] = url
                other.go.clear()
                jobs = [asyncio.create_task(generate(pool, f"r{i}")) for i in range(4)]
                await until(lambda: len(other.held) == 2)
                pool.lose(0)
                await until(lambda: len(other.held) == 4)
                other.go.set()
                assert len(await asyncio.gather(*jobs)) == 4
                assert (pool.retried, pool.restarts, pool.in_flight) == (2, 1, [0, 0])

    asyncio.run(scenario())


@pytest.mark.parametrize("failure", ["the connection breaks", "the engine says 500"])
def test_a_failure_just_before_the_supervisors_word_is_a_death(failure):
    async def scenario():
        async with pool_of(2) as (pool, (first, other)):

            async def die(request):
                if failure == "the engine says 500":
                    raise web.HTTPInternalServerError
                request.transport.abort()

            first.dying = die
            job = asyncio.create_task(generate(pool))
            await until(lambda: first.bodies)
            await asyncio.sleep(0.1)
            assert not job.done()
            pool.lose(0)
            await asyncio.wait_for(job, 60)
            assert len(other.bodies) == 1

    asyncio.run(scenario())


FAILED_ALONE = {"message": "this request failed in the engine: no memory", "type": "InternalServerError", "code": 500}
VLLM_DIES = FAILED_ALONE | {"message": "EngineCore encountered an issue. See stack trace (above) for the root cause."}


def saying(error):
    async def say(request):
        raise web.HTTPInternalServerError(text=json.dumps({"error": error}), content_type="application/json")

    return say


@pytest.mark.parametrize("path", ["direct", "router"])
def test_a_request_that_fails_in_an_engine_is_not_asked_again(path):
    """It would fail again, and cost everybody in its step a recomputation each time."""

    async def scenario():
        async with pool_of() as (pool, (engine,)):
            engine.dying = saying(FAILED_ALONE)
            pool.router = pool.urls[0] if path == "router" else None
            with pytest.raises(EngineError, match="no memory"):
                await asyncio.wait_for(generate(pool), 60)
            assert (len(engine.bodies), pool.retried, pool.in_flight) == (1, 0, [0])

    asyncio.run(scenario())


@pytest.mark.parametrize("path", ["direct", "router"])
def test_a_500_of_an_engine_that_is_dying_is_no_answer(path):
    async def scenario():
        async with pool_of(2) as (pool, (first, _)):
            first.dying = saying(VLLM_DIES)
            pool.router = pool.urls[0] if path == "router" else None
            job = asyncio.create_task(generate(pool))
            await until(lambda: first.bodies)
            await asyncio.sleep(0.1)
            assert not job.done()
            first.dying = None
            pool.lose(0)
            await asyncio.wait_for(job, 60)

    asyncio.run(scenario())


def test_a_lone_replica_is_waited_for_and_has_the_weights_before_it_generates():
    async def scenario():
        async with pool_of() as (pool, (engine,)):
            await pool.init_weight_transfer({"verify_checksum": True})
            await pool.update_weights(3, {"version": 3})
            engine.go.clear()
            job = asyncio.create_task(generate(pool))
            await until(lambda: engine.held)
            pool.lose(0)
            engine.go.set()  # the new process
            await asyncio.sleep(0.05)
            engine.log.clear()
            engine.bodies.clear()
            late = asyncio.create_task(generate(pool, "late"))
            await asyncio.sleep(0.1)
            assert not engine.bodies
            await pool.readmit(0, 60)
            await asyncio.wait_for(asyncio.gather(job, late), 60)
            assert engine.log[:6] == ["init_weight_transfer_engine", "pause", *UPDATE, "resume"]
            assert sorted(body["request_id"] for body in engine.bodies) == ["late", "r"]

    asyncio.run(scenario())


def test_updates_pass_a_dead_replica_by_and_it_gets_the_newest():
    async def scenario():
        with dead_server() as url:
            async with pool_of(2) as (pool, (back, other)):
                await pool.update_weights(1, {"version": 1})
                alive, pool.urls[0] = pool.urls[0], url
                update = asyncio.create_task(pool.update_weights(2, {"version": 2}))
                await until(lambda: "pause" in other.log[5:])
                pool.lose(0)  # in the middle of an update
                await asyncio.wait_for(update, 60)
                await asyncio.wait_for(pool.update_weights(3, {"version": 3}), 60)
                assert [info["version"] for info in other.loaded] == [1, 2, 3]
                pool.urls[0] = alive
                back.loaded.clear()
                await pool.readmit(0, 60)
                assert back.loaded == [{"version": 3}]
                assert pool.serving == [True, True]

    asyncio.run(scenario())


def test_weights_that_are_gone_are_waited_for():
    async def scenario():
        async with pool_of(2) as (pool, (back, _)):
            await pool.update_weights(1, {"version": 1})
            pool.lose(0)
            back.missing = 1
            returning = asyncio.create_task(pool.readmit(0, 60))
            await until(lambda: not back.missing)
            assert pool.serving == [False, True]
            await pool.update_weights(2, {"version": 2})
            await asyncio.wait_for(returning, 60)
            assert back.loaded[-1] == {"version": 2}
            assert pool.serving == [True, True]

    asyncio.run(scenario())


def test_a_replica_that_does_not_come_back_is_an_error():
    async def scenario():
        async with pool_of(2) as (pool, (back, _)):
            await pool.update_weights(1, {"version": 1})
            pool.lose(0)
            back.missing = 1000
            with pytest.raises(EngineError, match=r"update_weights by 400: .*cannot be fetched"):
                await pool.readmit(0, 0.3)

    asyncio.run(scenario())


def test_the_supervisors_word_is_followed_once_for_each_restart(tmp_path):
    async def scenario():
        async with pool_of(2) as (pool, (first, second)):
            status = tmp_path / "status.json"
            follow = asyncio.create_task(follow_restarts(tmp_path, ["inference/0", "inference/1"], pool, 5))
            for restarts in (0, 1, 2):
                status.write_text(json.dumps({"state": "running", "roles": {"inference/1": {"restarts": restarts}}}))
                await until(lambda n=restarts: len(second.log) == n and pool.serving == [True, True])
                await asyncio.sleep(2.5 * INTERVAL_S)  # it stays so
                assert pool.restarts == restarts
                assert pool.serving == [True, True]
            assert (len(first.log), second.log) == (0, ["init_weight_transfer_engine"] * 2)
            follow.cancel()

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_restarted_engine_generates_nothing_before_it_has_weights(tmp_path):
    with running_server([], tmp_path / "cache", job="rl", restarts=1) as client:
        reply = client.generate()
        assert reply.status == 503
        assert "no weights since a restart" in reply.body["error"]["message"]
        config = client.ctx.plan.config
        path = resolve_model_path(config.model, Path(config.cache_dir))
        model = load_model(path, config.model.card, torch.float32, torch.device("cpu"))
        info = published(FilesystemPublisher(client.ctx.run_dir / "weights", 2), 5, hf_tensors(model))
        client.post("/start_weight_update", {})
        client.post("/update_weights", {"update_info": info})
        assert client.post("/finish_weight_update", {"weight_version": "5"}).status == 200
        (choice,) = client.generate().body["choices"]
        assert choice["weight_versions"][0]["version"] == "5"
