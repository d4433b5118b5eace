"""Where weights come from and go to: paths, segments, slow strangers, addresses of either family."""

from __future__ import annotations

import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from inference_server import Client, running_server
from weight_updates import published

from prl.transport import weights_tcp
from prl.transport.sources import WeightSource
from prl.transport.stores import serve_store
from prl.transport.weights_tcp import KEY_BYTES, TcpPublisher, WeightServer, receive_tcp


def source(transport: str) -> WeightSource:
    return WeightSource(transport, "/run/weights", "/dev/shm/prl-none", ("127.0.0.1",), 10.0)


@pytest.mark.parametrize("path", ["/run/weights/..", "/run/weights/", "/run/weights/.", "/run/weights", "/run", ""])
def test_adapters_have_a_name_of_their_own(path: str) -> None:
    with pytest.raises(ValueError, match="weights come from"):
        source("lora").check_path(path, path.rpartition("/")[2])
    source("lora").check_path("/run/weights/step_3", "step_3")


GONE = {"type": "shared_memory", "version": 1, "path": "/dev/shm/prl-none-1", "ranks": 2}


def test_a_segment_that_is_gone_is_told() -> None:
    with pytest.raises(ValueError, match="segment"):
        source("shared_memory").check(GONE)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with running_server(["weight_transport=shared_memory"], tmp_path_factory.mktemp("cache")) as client:
        yield client


def test_an_engine_answers_400_for_a_segment_that_is_gone(client: Client) -> None:
    client.post("/start_weight_update", {"is_checkpoint_format": False})
    info = GONE | {"path": f"{client.ctx.shared_memory}-1"}
    reply = client.post("/update_weights", {"update_info": info})
    assert reply.status == 400
    assert "segment" in reply.body["error"]["message"]


def test_requests_that_failed_are_among_those_that_ended(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    from prl.inference import engine

    def failing(*args):
        raise RuntimeError("once")

    def failures() -> float:
        ended = client.metrics("request_success_total")
        return next(count for labels, count in ended.items() if 'finished_reason="error"' in labels)

    assert failures() == 0
    monkeypatch.setattr(engine, "draw", failing)
    assert client.generate().status == 500
    monkeypatch.undo()
    assert failures() == 1


def drip(connection: socket.socket, count: int) -> None:
    for _ in range(count):
        connection.sendall(b"x")
        time.sleep(0.4)


def test_who_drips_a_key_makes_room_for_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_tcp, "KEY_S", 0.5)
    server = WeightServer("127.0.0.1", 5.0)
    server.strangers = threading.BoundedSemaphore(1)
    key = secrets.token_bytes(KEY_BYTES)
    server.versions = {key: (b"wei", bytearray(b"ghts"))}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(ConnectionError), socket.create_connection(server.server_address) as stranger:
            drip(stranger, KEY_BYTES - 1)  # cut off before its end
        monkeypatch.setattr(weights_tcp, "KEY_S", 60.0)
        with socket.create_connection(server.server_address) as engine:
            engine.sendall(key)
            engine.settimeout(60)
            assert engine.makefile("rb").read(7) == b"weights"
    finally:
        server.shutdown()
        server.server_close()


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ADDRESSES = ["127.0.0.1", "localhost", pytest.param("::1", marks=pytest.mark.skipif(not has_ipv6(), reason="no IPv6"))]


@pytest.mark.parametrize("address", ADDRESSES)
def test_stores_and_weights_are_served_at_addresses_of_either_family(address: str) -> None:
    store = serve_store(address, timedelta(seconds=5))
    store.set("key", "value")
    assert store.clone().get("key") == b"value"
    publisher = TcpPublisher(address, 5.0)
    info = published(publisher, 1, [("w", torch.arange(3.0))])
    ((name, tensor),) = receive_tcp(info, verify=True)
    assert (name, tensor.tolist()) == ("w", [0.0, 1.0, 2.0])
    publisher.server.shutdown()
    publisher.server.server_close()
