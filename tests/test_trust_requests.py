"""No request ends a server: bounds, sequences that fail alone, a router that does not hand poison on."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from typing import Any

import pytest
from aiohttp import web
from inference_server import LIMIT_S, TOKEN, Client, running_server, slow_steps
from test_router_proxy import KEY, Upstream, routed

from prl.config import compose
from prl.config.errors import UserError
from prl.inference import engine as engine_module
from prl.inference.bounds import BOUNDS, MAX_DEPTH, check_bounds, parse_json
from prl.inference.isolation import MAX_FAILED_STEPS
from prl.inference.router import replicas
from prl.transport import serving

GENERATE = "/inference/v1/generate"
OF_NUMBERS = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
POISON: dict[str, Any] = {
    "min_tokens": {"min_tokens": 1 << 63, "max_tokens": 1 << 64},
    "min_tokens within 64 bits": {"min_tokens": (1 << 63) - 1, "max_tokens": (1 << 63) - 1},
    "temperature": {"temperature": 1e39},
    "max_tokens": {"max_tokens": 1 << 70},
    "seed": {"seed": 1 << 64},
    "top_k": {"top_k": 1 << 40},
    "n": {"n": 1 << 40},
    "stop_token_ids": {"stop_token_ids": [1] * 5000},
    "a stop token beyond the vocabulary": {"stop_token_ids": [1 << 40]},
}
BODIES = {
    "a token beyond the vocabulary": {"token_ids": [1 << 63]},
    "a negative token": {"token_ids": [-1]},
    "priority": OF_NUMBERS | {"priority": 1 << 70},
    "request_id": OF_NUMBERS | {"request_id": "x" * 10_000},
    "NaN": b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}',
    "Infinity": b'{"token_ids": [1], "sampling_params": {"max_tokens": Infinity}}',
    "1e999": b'{"token_ids": [1], "sampling_params": {"temperature": 1e999}}',
    "a deep body": b"[" * 100_000,
    "digits": b'{"token_ids": [' + b"9" * 5000 + b"]}",
    "no text": b"\xff\xfe\x00",
}


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def client(cache_dir):
    with running_server(["inference.max_num_seqs=8"], cache_dir, job="rl") as client:
        yield client


@pytest.fixture(autouse=True)
def still_serves(client: Client):
    yield
    assert not client.error, client.error
    assert client.generate().status == 200


@pytest.mark.parametrize("what", POISON)
def test_a_number_beyond_its_bounds_is_refused(client: Client, what: str) -> None:
    reply = client.generate(**{"max_tokens": 4} | POISON[what])
    assert reply.status == 400, reply


@pytest.mark.parametrize("what", BODIES)
def test_a_body_beyond_its_bounds_is_refused(client: Client, what: str) -> None:
    assert client.post(GENERATE, BODIES[what]).status == 400


@pytest.mark.parametrize("part", ["role", "content"])
def test_half_a_character_in_a_message_is_refused(client: Client, part: str) -> None:
    message = {"role": "user", "content": "hello"} | {part: "\ud800"}
    assert client.post("/v1/chat/completions", {"messages": [message], "max_tokens": 2}).status == 400


def test_a_body_that_is_not_encoded_as_it_says_is_refused(client: Client) -> None:
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", client.port)) as connection:
        connection.sendall(f"{head}Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{{}}".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_a_body_too_long_is_refused_unread(client: Client) -> None:
    assert client.post(GENERATE, b" " * (4 << 20)).status == 413


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_holds_on_both_sides(name: str) -> None:
    low, high = BOUNDS[name]
    for deep in ({name: low}, {"sampling_params": {name: high}}):
        check_bounds(deep, 10)
    for wrong in (low - 1, high * 2 + 1, 1 << 80):
        for here in ({name: wrong}, {"sampling_params": {name: wrong}}, {name: [wrong]}):
            with pytest.raises(ValueError, match=name):
                check_bounds(here, 10)
    with pytest.raises(ValueError, match="no number of JSON"):
        parse_json(json.dumps({name: float("nan")}).encode())


PROPERTIES = {"x": {"type": "number", "maximum": 1e10}, "n": {"default": 0, "seed": -9e99}}
SCHEMA = {"type": "object", "properties": PROPERTIES}
CALL = {"type": "function", "function": {"name": "f", "arguments": {"temperature": 2000, "n": 0}}}
NOT_OURS: dict[str, Any] = {
    "a tool's schema": {"tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]},
    "the schema of an answer": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "structured outputs": {"sampling_params": {"structured_outputs": {"json": SCHEMA}}},
    "a call's arguments": {"messages": [{"role": "assistant", "content": "x", "tool_calls": [CALL]}]},
    "metadata": {"metadata": {"t": 1.7e9, "user": "x" * 600, "id": 1 << 60}},
    "arguments of the template": {"chat_template_kwargs": {"n": 5000, "tokens": [1 << 40]}},
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_names_bind_no_one_where_they_mean_nothing(what: str) -> None:
    check_bounds(parse_json(json.dumps(NOT_OURS[what]).encode()), 10)


@pytest.mark.parametrize("where", ["tools", "metadata", "messages", "chat_template_kwargs"])
def test_what_no_program_could_hold_is_refused_wherever_it_is(where: str) -> None:
    nested: Any = 1
    for _ in range(MAX_DEPTH):
        nested = [nested]
    wide = (1 << 64, [1, 1 << 64, 2], [1, -(1 << 64), 2], [1, "a", 1 << 64])
    for wrong, why in (*((value, "64 bits") for value in wide), (nested, "nests more")):
        with pytest.raises(ValueError, match=why):
            check_bounds({where: [{"a": wrong}]}, 10)


def test_every_temperature_that_a_run_may_have_is_one_that_engines_take() -> None:
    with pytest.raises(UserError, match="temperature"):
        compose([f"inference.sampling.temperature={BOUNDS['temperature'][1] + 1:g}"])


# --- sequences that fail ----------------------------------------------------------------------------------------------


def fail_for(monkeypatch: pytest.MonkeyPatch, seeds: set[int] | None) -> None:
    """The sampler raises when one of these is in the batch; None: always."""
    draw = engine_module.draw

    def failing(distribution, table, positions):
        if seeds is None or seeds & set(table.seed.tolist()):
            raise RuntimeError("a bug of this sequence")
        return draw(distribution, table, positions)

    monkeypatch.setattr(engine_module, "draw", failing)


def test_a_sequence_that_fails_fails_alone(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    client.post("/reset_prefix_cache")
    undisturbed = [client.generate(f"u{i}", seed=i, max_tokens=60).body["choices"][0]["token_ids"] for i in range(4)]
    fail_for(monkeypatch, {99})
    good = [client.start_generate(f"g{i}", seed=i, max_tokens=60) for i in range(4)]
    for i in range(3):
        bad = client.generate(f"b{i}", seed=99, max_tokens=60)
        assert bad.status == 500
        assert "a bug of this sequence" in bad.body["error"]["message"]
    assert [future.result().body["choices"][0]["token_ids"] for future in good] == undisturbed
    monkeypatch.undo()
    client.until("num_requests_running", 0)
    assert client.metric("num_requests_waiting") == 0


def test_a_failure_while_decoding_costs_one_of_them(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    with slow_steps():
        good = [client.start_generate(f"g{i}", seed=i, max_tokens=150) for i in range(3)]
        bad = client.start_generate("bad", seed=99, max_tokens=150)
        client.until("num_requests_running", 4)
        fail_for(monkeypatch, {99})
    assert bad.result().status == 500
    assert [future.result().status for future in good] == [200] * 3


def test_an_engine_in_which_all_fails_ends_with_the_cause(cache_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_server([], cache_dir, job="rl") as broken:
        fail_for(monkeypatch, None)
        statuses = [broken.generate(f"r{i}").status for i in range(MAX_FAILED_STEPS)]
        assert statuses == [500] * (MAX_FAILED_STEPS - 1) + [503]
        deadline = time.monotonic() + LIMIT_S
        while not broken.error and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "a bug of this sequence" in str(broken.error[0])
        monkeypatch.undo()


# --- the router -------------------------------------------------------------------------------------------------------


def dies_of_it(upstream: Upstream, deaths: list[str], how: str) -> None:
    async def act(request: web.Request) -> web.Response:
        if b"poison" not in upstream.asked[-1][1]:
            return web.json_response({"who": upstream.name})
        deaths.append(upstream.name)
        if how == "says so":
            error = {"message": "the engine died", "type": "EngineDeadError", "code": 503}
            return web.json_response({"error": error}, status=503)
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    upstream.act = act


@pytest.mark.parametrize("how", ["says so", "breaks off"])
def test_a_request_that_ended_two_replicas_gets_no_third(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "CHECK_INTERVAL_S", 0.05)

    async def scenario():
        deaths: list[str] = []
        async with routed(4) as (router, upstreams):
            for upstream in upstreams:
                dies_of_it(upstream, deaths, how)
            status, text = await router.ask(token_ids=[1], request_id="poison")
            assert (status, len(deaths)) == (503, 2), text
            assert "2 replicas died with this request" in text
            assert (await router.ask(token_ids=[1], request_id="good"))[0] == 200

    asyncio.run(scenario())


@pytest.mark.parametrize("status", [400, 404, 413, 500])
def test_what_a_replica_refuses_no_other_is_asked(status: int) -> None:
    async def scenario():
        async with routed(3) as (router, upstreams):
            for upstream in upstreams:
                upstream.status = status
            assert (await router.ask(token_ids=[1]))[0] == status
            assert sum(len(upstream.asked) for upstream in upstreams) == 1

    asyncio.run(scenario())


def test_what_is_no_json_and_what_is_too_long_reaches_no_replica() -> None:
    async def scenario():
        async with routed(1) as (router, (upstream,)):
            router.router.body_limit = 1000
            for data, status in ((b"{", 400), (b'{"a": NaN}', 400), (b" " * 2000, 413)):
                url = router.url + GENERATE
                async with router.session.post(url, data=data, headers=KEY) as response:
                    assert response.status == status
            header = {**KEY, "X-Mine": "ü"}
            async with router.session.post(router.url + GENERATE, json=OF_NUMBERS, headers=header) as response:
                assert response.status == 200
            assert len(upstream.asked) == 1

    asyncio.run(scenario())


# --- who sends slowly -------------------------------------------------------------------------------------------------


def closed_within(connection: socket.socket, limit_s: float) -> bool:
    connection.settimeout(limit_s)
    try:
        while connection.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_half_open_requests_leave(cache_dir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 800, none is there after the time for a head, or a body; nobody else waits for them meanwhile."""
    monkeypatch.setattr(serving, "HEAD_S", 2.0)
    monkeypatch.setattr(serving, "BODY_S", 2.0)
    head = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n".encode()
    begun = (b"", b"GET /health HT", head, head + b"Content-Length: 100\r\n\r\n{")
    with running_server([], cache_dir, job="rl") as slow:
        strangers = [socket.create_connection(("127.0.0.1", slow.port)) for _ in range(800)]
        for i, stranger in enumerate(strangers):
            stranger.sendall(begun[i % len(begun)])
        assert slow.generate().status == 200
        began = time.monotonic()
        assert all(closed_within(stranger, 40) for stranger in strangers)
        assert time.monotonic() - began < 50
        for stranger in strangers:
            stranger.close()
        assert slow.generate().status == 200
