"""Many requests to sample over one connection: frames, the built-in server's end, and the orchestrator's."""

from __future__ import annotations

import asyncio
import contextlib
import json
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import pytest
from fake_engine import SAMPLING
from hypothesis import given
from hypothesis import strategies as st
from inference_server import TOKEN, Client, running_server, slow_steps
from role_context import context_of

from prl.config import compose
from prl.config.schema import InferenceConfig
from prl.inference import socket_route
from prl.inference.socket_route import Conversation
from prl.orchestrator import neighbours
from prl.orchestrator.engines import pool as engines
from prl.orchestrator.engines.answers import LARGE, EngineError
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.engines.requests import GENERATE, generate_body
from prl.orchestrator.engines.socket import SamplingSocket
from prl.orchestrator.neighbours import longest_answer
from prl.runtime.process.keys import RunKeys
from prl.transport.answers import decode_answer, encode_answer
from prl.transport.sampling_socket import (
    FRAME,
    PIECE,
    cancel_text,
    frames_of,
    parts_of,
    read_messages,
    read_parts,
    request_text,
)

PROMPT = [258, 104, 105, 256, 259]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with running_server(["inference.return_routed_experts=true"], tmp_path_factory.mktemp("cache"), job="rl") as client:
        yield client


@pytest.fixture(autouse=True)
def idle(request):
    """Every test leaves the server running, with nothing to do."""
    yield
    if "server" in request.fixturenames:
        client = request.getfixturevalue("server")
        assert not client.error, client.error
        client.until("num_requests_running", 0)
        client.until("num_requests_waiting", 0)


@asynccontextmanager
async def socket_to(port: int, key: str = TOKEN, timeout_s: float = 60):
    headers, timeout = {"Authorization": f"Bearer {key}"}, aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def call(method, url, route, asked):
            async with session.request(method, url + route, json=asked) as answer:
                return {"by_post": answer.status}

        socket = SamplingSocket(session, f"http://127.0.0.1:{port}", call)
        yield socket
        await socket.close()


def body(request_id: str = "r", tokens: int = 8, seed: int = 1, **changes):
    return generate_body(PROMPT, tokens, seed, "salt", SAMPLING, request_id, {"ignore_eos": True}, 0) | changes


# --- frames -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 3 * PIECE)), max_size=4))
def test_answers_come_out_as_they_went_in(sizes):
    rng, sent, stream = np.random.default_rng(0), {}, []
    for number, size in sizes:
        sent[number] = encode_answer({"n": number, "data": rng.integers(0, 256, size, np.uint8)})
    for number, message in sent.items():
        stream += list(parts_of(number, 200, message))
    assert all(len(part) < 1.1 * PIECE for part in stream)
    found: dict[int, list] = {number: [] for number in sent}
    over = set()
    for part in read_parts(b"".join(stream)):
        assert part.number not in over
        found[part.number].append(part.payload)
        over |= set() if part.more else {part.number}
    assert over == sent.keys()
    assert all(b"".join(found[number]) == bytes(message) for number, message in sent.items())


def test_requests_share_frames_up_to_a_size():
    (frame,) = frames_of(map(cancel_text, range(1000)))
    assert [number for number, _ in read_messages(json.loads(frame))] == list(range(1000))
    large = [request_text(1, {"x": "y" * FRAME}), cancel_text(2)]
    assert list(frames_of(large)) == [f"[{text}]" for text in large]
    assert list(frames_of([])) == []


@pytest.mark.parametrize("frame", [b"\x00", b"\x01" * 15, next(parts_of(1, 200, b"12345"))[:-1]])
def test_what_is_cut_off_is_no_answer(frame):
    with pytest.raises(ValueError, match="cut off"):
        list(read_parts(frame))


NONSENSE = {
    "an object": {"id": 1, "body": {}},
    "a number": [3],
    "no id": [{"body": {}}],
    "an id that is a truth value": [{"id": True, "body": {}}],
    "an id below 0": [{"id": -1, "body": {}}],
    "no body": [{"id": 1}],
    "a body that is a list": [{"id": 1, "body": []}],
}


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense_is_no_request(case):
    with pytest.raises(ValueError, match=r"must be|must have|has no body"):
        list(read_messages(NONSENSE[case]))


# --- the server's end -------------------------------------------------------------------------------------------------


def test_answers_are_those_of_post(server: Client):
    posted = [server.post(GENERATE, body(str(n), 5 + n, n)).body for n in range(6)]

    async def scenario():
        async with socket_to(server.port) as socket:
            found = await asyncio.gather(*(socket.ask(body(str(n), 5 + n, n)) for n in range(6)))
            assert socket.link.numbers.__reduce__()[1] == (6,), "over one connection"
        return found

    for one, other in zip(asyncio.run(scenario()), posted, strict=True):
        assert one.keys() == other.keys()
        assert one["request_id"] == other["request_id"]
        (mine,), (theirs,) = one["choices"], other["choices"]
        assert mine["token_ids"].tolist() == theirs["token_ids"].tolist()
        assert np.array_equal(mine["routed_experts"], theirs["routed_experts"])
        assert mine["weight_versions"] == theirs["weight_versions"]


def test_a_bad_request_fails_alone(server: Client):
    async def scenario():
        async with socket_to(server.port) as socket:
            asked = [
                body("a"),
                body("b", token_ids=[10**6]),
                body("c", stream=True),
                body("d", model="other"),
                body("e"),
            ]
            return await asyncio.gather(*map(socket.ask, asked), return_exceptions=True)

    first, *refused, last = asyncio.run(scenario())
    assert [first["request_id"], last["request_id"]] == ["a", "e"]
    assert [error.status for error in refused] == [400, 400, 404]
    assert all(error.refused for error in refused)
    assert "token" in str(refused[0])


def test_cancelling_ends_one_and_hanging_up_ends_all(server: Client):
    """Long before they would have ended by themselves, after 8 seconds."""

    async def running(count: int) -> None:
        async with asyncio.timeout(4):
            while server.get("/load").body["server_load"] != count:
                await asyncio.sleep(0.01)

    async def scenario():
        async with socket_to(server.port) as socket:
            tasks = [asyncio.create_task(socket.ask(body(str(n), 160, n))) for n in range(3)]
            await running(3)
            tasks[1].cancel()
            await running(2)
            assert (await socket.ask(body("short", 2)))["request_id"] == "short"
            assert not tasks[0].done()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(ended[1], asyncio.CancelledError)
        assert all(isinstance(one, EngineError) and one.lost for one in (ended[0], ended[2]))
        await running(0)

    with slow_steps(0.05):
        asyncio.run(scenario())


def test_what_takes_too_long_is_cancelled_and_the_next_goes_over_another_connection(server: Client):
    async def scenario():
        async with socket_to(server.port, timeout_s=0.5) as socket:
            with pytest.raises(EngineError) as error:
                await socket.ask(body("slow", 100))
            assert error.value.lost
            assert socket.link is None
            async with asyncio.timeout(10):
                while socket.links:
                    await asyncio.sleep(0.01)
            assert (await socket.ask(body("quick", 1)))["request_id"] == "quick"

    with slow_steps(0.05):
        asyncio.run(scenario())


def test_only_who_may_sample_comes_in(server: Client):
    """Who is refused is asked by POST, and hears why."""

    async def scenario():
        async with socket_to(server.port, key="wrong") as socket:
            assert await socket.ask(body()) == {"by_post": 401}

    asyncio.run(scenario())
    assert server.get(GENERATE).status == 405


def test_a_body_that_is_no_json_fails_alone(server: Client):
    async def scenario():
        async with socket_to(server.port) as socket:
            bad = (body("x", token_ids=[np.int64(5)]), body("y", temperature=float("nan")))
            return await asyncio.gather(*map(socket.ask, [body("a"), *bad, body("b")]), return_exceptions=True)

    first, wrong, nan, last = asyncio.run(scenario())
    assert isinstance(wrong, TypeError)
    assert isinstance(nan, ValueError)
    assert (first["request_id"], last["request_id"]) == ("a", "b")


def test_what_the_engine_hangs_up_on_is_refused(server: Client, monkeypatch):
    async def scenario():
        async with socket_to(server.port) as socket:
            await socket.ask(body("first", 1))
            monkeypatch.setattr(socket.link, "numbers", iter([-1]))
            with pytest.raises(EngineError, match="must have an id") as error:
                await socket.ask(body("second"))
            assert error.value.refused
            assert (await socket.ask(body("third", 1)))["request_id"] == "third"

    asyncio.run(scenario())


class SlowClient:
    """What a `Conversation` sends through: it waits until `may_go` as aiohttp has all senders wait, for one future."""

    def __init__(self):
        self.sent, self.may_go = [], asyncio.Event()
        self.closed = None

    async def send_bytes(self, data):
        await self.may_go.wait()
        self.sent.append(data)

    async def close(self, **options):
        await self.may_go.wait()
        self.closed = options


def test_a_request_that_is_cancelled_takes_no_answer_along():
    """Also where all that was sent waits for a slow client; and nothing is left of it."""
    long = encode_answer({"data": np.arange(PIECE)})

    async def answer(asked):
        if asked.get("waits"):
            await asyncio.sleep(60)
        return long if asked.get("long") else encode_answer({"n": 1})

    async def scenario():
        client = SlowClient()
        conversation = Conversation(client, answer)
        conversation._take(json.dumps([{"id": n, "body": {"long": n % 2}} for n in range(6)]))
        conversation._take(json.dumps([{"id": 6, "body": {"waits": 1}}, {"id": 7, "body": {"waits": 1}}]))
        conversation._take(json.dumps([{"cancel": 7}]))  # before its first step
        await asyncio.sleep(0.01)
        conversation._take(json.dumps([{"cancel": 1}, {"cancel": 6}]))
        await asyncio.sleep(0.01)
        assert not conversation.tasks
        assert conversation.unsent == 6
        client.may_go.set()
        async with asyncio.timeout(10):
            while conversation.unsent:
                await asyncio.sleep(0.001)
        ended = {part.number for part in read_parts(b"".join(client.sent)) if not part.more}
        conversation._stop()
        return ended

    assert asyncio.run(scenario()) == set(range(6))


def test_a_client_that_reads_nothing_is_left(monkeypatch):
    """Its requests are bounded, and it holds up nobody's end."""
    monkeypatch.setattr(socket_route, "CLOSE_S", 0.05)
    monkeypatch.setattr(socket_route, "AT_ONCE", 8)

    async def answer(asked):
        return encode_answer({"n": 1})

    async def scenario():
        client = SlowClient()
        conversation = Conversation(client, answer)
        conversation._take(json.dumps([{"id": n, "body": {}} for n in range(8)]))
        await asyncio.sleep(0.01)
        assert not conversation.tasks
        with pytest.raises(ValueError, match="more than 8 requests at once"):
            conversation._take(json.dumps([{"id": 9, "body": {}}]))
        async with asyncio.timeout(5):
            await conversation.end(1001)
        await asyncio.wait([conversation.sender], timeout=5)
        assert conversation.sender.cancelled()
        assert client.closed is None

    asyncio.run(scenario())


@pytest.mark.parametrize("case", [*NONSENSE, "no JSON", "twice the same", "too large"])
def test_a_client_that_talks_nonsense_is_hung_up_on(server: Client, case):
    text = {
        "no JSON": "{",
        "twice the same": json.dumps([{"id": 7, "body": body(tokens=100)}] * 2),
        "too large": " " * (8 << 20),
    }.get(case) or json.dumps(NONSENSE[case])

    async def scenario():
        async with socket_to(server.port) as other, aiohttp.ClientSession() as session:
            beside = asyncio.create_task(other.ask(body("beside", 20)))
            headers = {"Authorization": f"Bearer {TOKEN}"}
            async with session.ws_connect(f"{other.url}{GENERATE}", headers=headers) as socket:
                with contextlib.suppress(ConnectionError):  # before all of what is too large has gone out
                    await socket.send_str(text)
                closed = await socket.receive(timeout=30)
            if case != "too large":
                assert (closed.type, closed.data) == (aiohttp.WSMsgType.CLOSE, 1008)
            assert socket.closed
            assert (await beside)["request_id"] == "beside"

    asyncio.run(scenario())


# --- the orchestrator's end -------------------------------------------------------------------------------------------


async def ask(pool: EnginePool, name: str):
    return await pool.generate(PROMPT, 8, 1, "salt", SAMPLING, name)


@asynccontextmanager
async def pool_to(*ports: int):
    urls, keys = [f"http://127.0.0.1:{port}" for port in ports], RunKeys(generate=TOKEN, control="control-token")
    pool = EnginePool(urls, InferenceConfig(), keys, by_socket=True)
    yield pool
    await pool.close()


def test_the_pool_asks_so(server: Client):
    async def scenario():
        async with pool_to(server.port) as pool:
            found = await asyncio.gather(*(ask(pool, str(n)) for n in range(40)))
            assert pool.sockets[0].link is not None
            return {tuple(one.token_ids) for one in found}

    assert len(asyncio.run(scenario())) == 1, "of one seed"


def test_what_is_asked_of_a_lost_engine_goes_over_another_connection(server: Client):
    """The old one may be that of a host that is gone, and never end."""

    async def scenario():
        async with pool_to(server.port) as pool:
            await ask(pool, "a")
            before = pool.sockets[0].link
            pool.lose(0)
            assert before.retired
            assert pool.sockets[0].link is None
            assert (await pool.sockets[0].ask(body("b", 1)))["request_id"] == "b"
            assert pool.sockets[0].link is not before

    asyncio.run(scenario())


def test_servers_that_are_leased_are_asked_by_post(tmp_path):
    """Who holds the lease is asked with each request."""

    async def scenario(port: int):
        async with socket_to(port) as socket:
            return await socket.ask(body())

    with running_server([], tmp_path) as leased:
        assert "by_post" in asyncio.run(scenario(leased.port))


def test_an_engine_that_is_started_again_is_found_again(tmp_path, monkeypatch):
    """At another port, as no two servers of a test can have the same; the pool is told that the first one is lost."""
    monkeypatch.setattr(engines, "NOTICE_S", 0.1)

    async def scenario(first: Client, second: Client):
        async with pool_to(first.port) as pool:
            assert (await ask(pool, "a")).token_ids
            with slow_steps(0.1):
                under_way = asyncio.create_task(ask(pool, "b"))
                await asyncio.sleep(0.2)
                first.ctx.stop_requested = True
                pool.urls[0] = pool.sockets[0].url = f"http://127.0.0.1:{second.port}"
                return await under_way, pool.retried

    with running_server([], tmp_path / "2", job="rl") as second, running_server([], tmp_path / "1", job="rl") as first:
        found, retried = asyncio.run(scenario(first, second))
    assert len(found.token_ids) <= 8
    assert retried == 1


def test_an_engine_whose_answers_are_nonsense_has_lost_them():
    from aiohttp import web

    async def nonsense(http):
        socket = web.WebSocketResponse()
        await socket.prepare(http)
        await socket.receive()
        await socket.send_bytes(b"nonsense")
        await socket.receive()
        return socket

    async def scenario():
        app = web.Application()
        app.router.add_get(GENERATE, nonsense)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with socket_to(site._server.sockets[0].getsockname()[1]) as socket:
            with pytest.raises(EngineError, match="hung up before it had answered") as error:
                await socket.ask(body())
            assert error.value.lost
        await runner.cleanup()

    asyncio.run(scenario())


def test_long_answers_are_asked_for_by_post():
    assert longest_answer(compose([])) < LARGE
    long = ["model=qwen3_30b_a3b", "seq_len=8192", "inference.max_model_len=8192"]
    assert longest_answer(compose([*long, "inference.return_routed_experts=true"])) >= LARGE


@pytest.mark.parametrize(("large", "by_socket"), [(LARGE, True), (1000, False)])
def test_runs_ask_over_one_connection_where_answers_are_short(tmp_path, monkeypatch, large, by_socket):
    ctx, told = context_of(tmp_path / "run", role="orchestrator"), []
    monkeypatch.setattr(neighbours, "LARGE", large)
    ctx.endpoints["inference/0"] = "http://127.0.0.1:9"
    monkeypatch.setattr(neighbours, "EnginePool", lambda *_, by_socket: told.append(by_socket))
    neighbours.own_engines(ctx)
    assert told == [by_socket]


def test_an_answer_may_come_in_parts_between_those_of_others():
    async def scenario():
        from prl.orchestrator.engines.socket import Link

        link = Link.__new__(Link)
        loop = asyncio.get_running_loop()
        link.waiting, link.begun = {n: loop.create_future() for n in (1, 2)}, {}
        long, short = encode_answer({"data": np.arange(3 * PIECE)}), encode_answer({"x": 1})
        first, *others = parts_of(1, 200, long)
        link._take(first + b"".join(parts_of(2, 200, short)) + b"".join(parts_of(3, 200, short)))
        link._take(b"".join(others))
        assert decode_answer((await link.waiting[2])[1]) == {"x": 1}
        assert np.array_equal(decode_answer((await link.waiting[1])[1])["data"], np.arange(3 * PIECE))

    asyncio.run(scenario())
