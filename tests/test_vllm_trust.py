"""vLLM behind our guard: keys, bounds and patience are those of the built-in engine."""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from inference_server import CONTROL, TOKEN
from test_trust_requests import BODIES, GENERATE, POISON, closed_within
from vllm_server import Server

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

CONTROL_ROUTES = (
    *("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights", "/collective_rpc"),
    *("/init_weight_transfer_engine", "/start_weight_update", "/finish_weight_update", "/abort_requests"),
    *("/start_profile", "/scale_elastic_ep", "/v1/load_lora_adapter", "/weight_checker", "/invocations", "/nothing"),
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture
def server(plain_vllm: Server) -> Server:
    return plain_vllm


@pytest.fixture(autouse=True)
def still_serves(server: Server) -> Iterator[None]:
    yield
    assert server.http.generate().status == 200


def test_control_is_not_for_clients(server: Server) -> None:
    assert server.http.control != CONTROL
    for key in (None, TOKEN, "guess"):
        assert {route: server.http.post(route, {}, key=key).status for route in CONTROL_ROUTES} == dict.fromkeys(
            CONTROL_ROUTES, 401
        )
    assert server.http.get("/is_paused").body == {"is_paused": False}


def test_weights_from_elsewhere_are_refused(server: Server, tmp_path: Path) -> None:
    ipc = {"type": "ipc", "host": "127.0.0.1", "port": 1, "version": 1, "timeout_s": 1.0}
    for info in ({"type": "filesystem", "path": str(tmp_path / "step_1"), "version": 1}, ipc):
        assert server.http.post("/start_weight_update", {"is_checkpoint_format": False}).status == 200
        reply = server.http.post("/update_weights", {"update_info": info})
        assert reply.status in (400, 500)
        assert "weights come" in str(reply.body)


@pytest.mark.parametrize("what", POISON)
def test_a_number_beyond_its_bounds_is_refused(server: Server, what: str) -> None:
    assert server.http.generate(**{"max_tokens": 4} | POISON[what]).status == 400
    chat = CHAT | POISON[what]
    assert server.http.post("/v1/chat/completions", chat).status == 400
    assert server.http.post("/v1/completions", {"prompt": "hi", **POISON[what]}).status == 400


@pytest.mark.parametrize("what", BODIES)
def test_a_body_beyond_its_bounds_is_refused(server: Server, what: str) -> None:
    assert server.http.post(GENERATE, BODIES[what]).status == 400


def test_a_body_too_long_is_refused(server: Server) -> None:
    assert server.http.post(GENERATE, b" " * (4 << 20)).status == 413


@pytest.mark.exhaustive
def test_half_open_requests_leave(server: Server) -> None:
    """After serving.HEAD_S."""
    begun = (b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /heal")
    strangers = [socket.create_connection(("127.0.0.1", server.http.port)) for _ in range(90)]
    for i, stranger in enumerate(strangers):
        stranger.sendall(begun[i % len(begun)])
    assert all(closed_within(stranger, 25) for stranger in strangers)
    for stranger in strangers:
        stranger.close()
