"""The built-in router over real HTTP, in front of small engines and in front of the orchestrator's pool."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket

import aiohttp
import pytest
from aiohttp import web
from fake_engine import generate, pool_of

from prl.config.schema import InferenceConfig, RouterConfig
from prl.inference.guard import GENERATING_ROUTES, Doors
from prl.inference.router import replicas
from prl.inference.router.proxy import CONTROL_ROUTES, Router
from prl.orchestrator.engines import pool as engines
from prl.orchestrator.engines.answers import EngineError
from prl.orchestrator.engines.pool import EnginePool
from prl.runtime.process.keys import RunKeys

KEY = {"Authorization": "Bearer token"}
PROMPT = list(range(64))


@pytest.fixture(autouse=True)
def checks_are_quick(monkeypatch):
    monkeypatch.setattr(replicas, "CHECK_INTERVAL_S", 0.05)
    monkeypatch.setattr(replicas, "CHECK_TIMEOUT_S", 0.2)
    monkeypatch.setattr(engines, "RETRY_S", 0.02)


class Upstream:
    """An engine that does what `act` says; by default it tells who it is and what it was asked."""

    def __init__(self, name):
        self.name, self.asked, self.status, self.act = name, [], 200, None

    @contextlib.asynccontextmanager
    async def serving(self):
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self.answer)
        async with served(app) as url:
            yield url

    async def answer(self, request):
        if request.path == "/health":
            return web.Response()
        self.asked.append((request.path_qs, await request.read(), dict(request.headers)))
        if self.act is not None:
            return await self.act(request)
        return web.json_response({"who": self.name}, status=self.status, headers={"X-Request-Id": "7"})


@contextlib.asynccontextmanager
async def served(app, port=0):
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


class Client:
    def __init__(self, session, url, router):
        self.session, self.url, self.router = session, url, router

    async def ask(self, method="POST", route="/inference/v1/generate", headers=KEY, **body):
        async with self.session.request(method, self.url + route, json=body or None, headers=headers) as response:
            return response.status, await response.text()

    async def who(self, ids=PROMPT):
        status, text = await self.ask(token_ids=ids)
        assert status == 200, text
        return text.split('"')[3]


async def until(condition, timeout_s=60):
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def routed(count=2, keys=(b"token",), urls=(), kinds=None, **config):
    """A router in front of upstreams (and of other URLs), and a client."""
    upstreams = [Upstream(f"u{i}") for i in range(count)]
    async with contextlib.AsyncExitStack() as stack:
        own = [await stack.enter_async_context(upstream.serving()) for upstream in upstreams]
        named = {f"inference/{i}": url for i, url in enumerate([*own, *urls])}
        router = Router(RouterConfig(**config), named, "token", Doors(tuple(keys) or None), kinds)
        url = await stack.enter_async_context(served(router.app()))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        await until(lambda: sum(replica.healthy for replica in router.replicas) >= count)
        yield Client(session, url, router), upstreams


# --- what is passed on, and what is not -------------------------------------------------------------------------------


@pytest.mark.parametrize("route", GENERATING_ROUTES)
def test_a_request_and_its_answer_pass_unchanged(route):
    async def scenario():
        async with routed(1) as (client, (upstream,)):
            body = b'{"token_ids": [1, 2],  "seed": 18446744073709551615}'
            headers = {**KEY, "Content-Type": "application/json", "X-Mine": "1", "Origin": "http://page.example"}
            async with client.session.post(client.url + route + "?a=b", data=body, headers=headers) as response:
                assert (response.status, await response.json()) == (200, {"who": "u0"})
                assert (response.headers["X-Request-Id"], response.content_type) == ("7", "application/json")
            ((path, received, seen),) = upstream.asked
            assert (path, received) == (route + "?a=b", body)
            assert (seen["X-Mine"], seen["Authorization"], "Origin" in seen) == ("1", "Bearer token", False)

    asyncio.run(scenario())


def test_requests_follow_their_prefix_and_the_counters_say_so():
    async def scenario():
        async with routed() as (client, upstreams):
            first = await client.who()
            other = await client.who([9] * 64)
            assert {first, other} == {"u0", "u1"}
            assert [await client.who([*PROMPT, *range(i)]) for i in (1, 20, 40)] == [first] * 3
            assert [await client.who([*[9] * 64, i]) for i in (1, 2)] == [other] * 2
            lines = (await client.ask("GET", "/metrics"))[1].splitlines()
            assert f'prl_router:requests_total{{replica="inference/{first[1]}"}} 4' in lines
            assert "prl_router:prompt_blocks_total 31" in lines
            assert "prl_router:prompt_blocks_matched_total 21" in lines
            assert [upstream.asked[0][2]["Authorization"] for upstream in upstreams] == ["Bearer token"] * 2

    asyncio.run(scenario())


def test_control_routes_are_refused_by_name():
    async def scenario():
        async with routed(1) as (client, (upstream,)):
            for route in CONTROL_ROUTES:
                status, text = await client.ask(route=route)
                assert status == 403
                assert route in text
            assert (await client.ask(route="/v1/nothing"))[0] == 404
            assert (await client.ask("GET", "/inference/v1/generate"))[0] == 404
            assert upstream.asked == []

    asyncio.run(scenario())


def test_keys_are_asked_for_and_open_routers_answer_no_web_pages():
    async def scenario():
        async with routed(1) as (client, (upstream,)):
            for headers in ({}, {"Authorization": "Bearer wrong"}):
                for route in ("/inference/v1/generate", "/pause"):
                    assert (await client.ask(route=route, headers=headers))[0] == 401
                for route in ("/v1/models", "/metrics", "/workers"):
                    assert (await client.ask("GET", route, headers=headers))[0] == 401
            assert (await client.ask("GET", "/health", headers={}))[0] == 200
            assert upstream.asked == []
        async with routed(1, keys=()) as (client, (upstream,)):
            assert (await client.ask("GET", "/v1/models", headers={}))[0] == 200
            for headers in ({"Origin": "http://page.example"}, {"Host": "page.example"}):
                assert (await client.ask(headers=headers))[0] == 401
            assert len(upstream.asked) == 1

    asyncio.run(scenario())


def test_an_engines_refusal_is_the_clients_and_is_not_asked_elsewhere():
    async def scenario():
        async with routed() as (client, upstreams):
            for upstream in upstreams:
                upstream.status = 400
            assert (await client.ask(token_ids=PROMPT))[0] == 400
            assert sum(len(upstream.asked) for upstream in upstreams) == 1
            assert client.router.retries == 0

    asyncio.run(scenario())


# --- streams and clients that go --------------------------------------------------------------------------------------


def test_a_stream_arrives_piece_by_piece_and_its_break_is_seen():
    async def scenario():
        go = asyncio.Event()

        async def stream(request):
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: 1\n\n")
            await go.wait()
            await response.write(b"data: 2\n\n")
            request.transport.abort()
            return response

        async with routed() as (client, upstreams):
            for upstream in upstreams:
                upstream.act = stream
            async with client.session.post(f"{client.url}/v1/completions", json={}, headers=KEY) as response:
                assert await asyncio.wait_for(response.content.readuntil(b"\n\n"), 60) == b"data: 1\n\n"
                go.set()
                with pytest.raises(aiohttp.ClientError):
                    await response.read()
            assert sum(len(upstream.asked) for upstream in upstreams) == 1, "what was begun is not asked again"

    asyncio.run(scenario())


def test_a_client_that_hangs_up_ends_the_generation():
    async def scenario():
        ended = asyncio.Event()

        async def work(request):
            try:
                await asyncio.sleep(60)
            finally:
                ended.set()

        async with routed(1) as (client, (upstream,)):
            upstream.act = work
            asking = asyncio.create_task(client.ask())
            await until(lambda: upstream.asked)
            assert client.router.replicas[0].in_flight == 1
            asking.cancel()
            await asyncio.wait_for(ended.wait(), 60)
            await until(lambda: client.router.replicas[0].in_flight == 0)
            assert client.router.replicas[0].healthy

    asyncio.run(scenario())


# --- replicas that die ------------------------------------------------------------------------------------------------


async def hang_up(request):
    request.transport.abort()
    return web.Response()


async def answer_503(request):
    return web.Response(status=503, text="no weights")


async def break_off(request):
    response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"{")
    request.transport.abort()
    return response


@pytest.mark.parametrize("act", [hang_up, answer_503, break_off])
def test_what_a_replica_does_not_answer_is_asked_of_another_until_it_is_well_again(act):
    async def scenario():
        async with routed() as (client, upstreams):
            sick = upstreams[int((await client.who())[1])]
            sick.act = act
            assert await client.who() != sick.name
            assert client.router.retries == 1
            sick.act = None
            await until(lambda: all(replica.healthy for replica in client.router.replicas))
            assert await client.who() != sick.name, "its cache is gone"
            for upstream in upstreams:
                upstream.act = act
            status, text = await client.ask(token_ids=PROMPT)
            assert status == 503
            assert "inference/" in text

    asyncio.run(scenario())


def test_a_port_that_takes_connections_for_a_successor_keeps_no_request():
    """While an engine is restarted, connections to its port are neither answered nor refused."""

    async def scenario():
        async with routed() as (client, upstreams):
            first = int((await client.who())[1])
            replica = client.router.replicas[first]
            with socket.create_server(("127.0.0.1", 0)) as leased:
                replica.url = f"http://127.0.0.1:{leased.getsockname()[1]}"
                answer = await asyncio.wait_for(client.who(), 10)
            assert answer == upstreams[1 - first].name
            assert not replica.healthy

    asyncio.run(scenario())


def test_without_a_healthy_replica_the_router_is_not_healthy():
    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as leased:
            url = f"http://127.0.0.1:{leased.getsockname()[1]}"
            async with routed(0, urls=[url]) as (client, _):
                assert (await client.ask("GET", "/health"))[0] == 503
                assert "no replica is healthy" in (await client.ask(token_ids=PROMPT))[1]

    asyncio.run(scenario())


# --- under the orchestrator -------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def routed_pool(count=2, wait=True):
    async with pool_of(count) as (pool, fakes):
        router = Router(RouterConfig(), dict(zip("ab", pool.urls, strict=False)), "token", Doors((b"token",)))
        async with served(router.app()) as pool.router:
            await pool.wait_healthy(60)
            if wait:
                await until(lambda: all(replica.healthy for replica in router.replicas))
            yield pool, fakes, router


def test_generation_goes_through_the_router_and_control_to_every_engine():
    async def scenario():
        async with routed_pool() as (pool, fakes, router):
            results = await asyncio.gather(*(generate(pool, f"r{i}") for i in range(4)))
            assert [[*result.versions] for result in results] == [[3, 3]] * 4
            assert [len(fake.bodies) for fake in fakes] == [2, 2]
            assert sum(replica.requests for replica in router.replicas) == 4
            await pool.update_weights(4, {"type": "none"})
            assert [len(fake.loaded) for fake in fakes] == [1, 1]
            await generate(pool, "direct", replica=1)
            assert fakes[1].bodies[-1]["request_id"] == "direct"
            assert sum(replica.requests for replica in router.replicas) == 4
            fakes[0].refuse = fakes[1].refuse = {"bad"}
            with pytest.raises(EngineError, match=r"400.*too long"):
                await generate(pool, "bad")

    asyncio.run(scenario())


def test_a_request_outlives_the_engines_that_it_was_sent_to():
    async def scenario():
        async with routed_pool() as (pool, fakes, _):
            for fake in fakes:
                fake.dying = hang_up  # the router has nobody left, and says 503
            jobs = [asyncio.create_task(generate(pool, f"r{i}")) for i in range(3)]
            await until(lambda: pool.retried > 3)
            for fake in fakes:
                fake.dying = None
            assert len(await asyncio.gather(*jobs)) == 3

    asyncio.run(scenario())


def test_a_request_outlives_the_router():
    async def scenario():
        async with pool_of(1) as (pool, (fake,)):
            fake.go.clear()
            named = {"a": pool.urls[0]}
            async with served(Router(RouterConfig(), named, "token", Doors((b"token",))).app()) as pool.router:
                await pool.wait_healthy(60)
                job = asyncio.create_task(generate(pool, "late"))
                await until(lambda: fake.held == ["late"])
            fake.go.set()
            port = int(pool.router.rsplit(":", 1)[1])
            async with served(Router(RouterConfig(), named, "token", Doors((b"token",))).app(), port):
                assert (await job).token_ids == [9, 9]
            assert pool.retried >= 1

    asyncio.run(scenario())


def test_a_router_that_fails_for_good_is_an_error(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_S", 0.1)

    async def scenario():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
        pool = EnginePool([], InferenceConfig(), RunKeys(generate="token"), router=f"http://127.0.0.1:{port}")
        try:
            with pytest.raises(
                EngineError, match=rf"{port}: nobody listens there \(asked for /inference/v1/generate\)"
            ):
                await generate(pool)
        finally:
            await pool.close()

    asyncio.run(scenario())


def test_a_replica_known_to_be_dead_is_waited_for(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_S", 0.1)

    async def scenario():
        async with routed_pool(1) as (pool, (fake,), _):
            fake.dying = hang_up
            pool.lose(0)
            job = asyncio.create_task(generate(pool))
            await asyncio.sleep(0.3)
            assert not job.done()
            assert not fake.bodies
            fake.dying = None
            await pool.readmit(0, 60)
            assert (await job).token_ids == [9, 9]

    asyncio.run(scenario())


def test_failures_while_a_replica_is_being_restarted_are_no_errors_however_long(monkeypatch):
    monkeypatch.setattr(engines, "NOTICE_S", 0.1)

    async def scenario():
        async with routed_pool() as (pool, fakes, _):
            for fake in fakes:
                fake.dying = hang_up
            pool.lose(0)
            job = asyncio.create_task(generate(pool))
            await asyncio.sleep(0.5)
            assert not job.done()
            fakes[1].dying = None
            assert (await job).token_ids == [9, 9]

    asyncio.run(scenario())


# --- prefill and decode apart -----------------------------------------------------------------------------------------

KINDS = ["prefill", "decode", "decode"]
PLACE = {"do_remote_prefill": True, "remote_block_ids": [3]}


def leave_kv(upstream):
    async def act(request):
        return web.json_response({"choices": [], "kv_transfer_params": PLACE})

    upstream.act = act


@pytest.mark.parametrize(
    ("route", "body", "short"),
    [
        ("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": {"max_tokens": 9, "seed": 3}},
         {"sampling_params": {"max_tokens": 1, "min_tokens": 0, "seed": 3}}),
        ("/v1/chat/completions", {"messages": [], "max_completion_tokens": 9, "stream": True, "n": 2},
         {"max_completion_tokens": 1, "stream": False}),
        ("/v1/completions", {"prompt": "a"}, {"max_tokens": 1}),
    ],
)  # fmt: skip
def test_a_prompt_goes_to_a_prefill_engine_and_its_kv_to_a_decode_engine(route, body, short):
    async def scenario():
        async with routed(3, kinds=KINDS) as (client, (prefill, *decode)):
            leave_kv(prefill)
            for _ in range(4):
                status, text = await client.ask(route=route, cache_salt="s", **body)
                assert status == 200, text
            first = [json.loads(asked) for _, asked, _ in prefill.asked]
            second = [json.loads(asked) for upstream in decode for _, asked, _ in upstream.asked]
            assert len(first) == len(second) == 4
            wish = {"do_remote_decode": True, "do_remote_prefill": False}
            expected = {"cache_salt": "s", "kv_transfer_params": wish, **short}
            assert {name: first[0].get(name) for name in expected} == expected
            assert "n" not in first[0]
            assert second[0] == {"cache_salt": "s", "kv_transfer_params": PLACE, **body}

    asyncio.run(scenario())


def test_what_a_prefill_engine_refuses_is_the_answer_and_without_one_there_is_none():
    async def scenario():
        async with routed(3, kinds=KINDS) as (client, (prefill, *decode)):
            prefill.status = 400
            assert await client.ask(token_ids=PROMPT) == (400, '{"who": "u0"}')
            prefill.status = 200
            status, text = await client.ask(token_ids=PROMPT)
            assert (status, "no place of its KV" in text) == (500, True)
            prefill.status = 503
            assert (await client.ask(token_ids=PROMPT))[0] == 503
            assert not [asked for upstream in decode for asked in upstream.asked]

    asyncio.run(scenario())
