"""Strangers at the door of a run over several nodes: they neither end its start nor delay it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import time

import pytest
from fuzzing import FEW, MANY, Footprint, many
from hypothesis import given
from hypothesis import strategies as st
from runtime_tree import TESTS, Root, Start, start, wait_for

from prl.runtime.nodes.door import MAX_STRANGERS, Door, knock
from prl.runtime.nodes.job_nodes import BY_HAND, KEY
from prl.runtime.nodes.wire import Wire

__all__ = ["start"]  # the fixture

TWO_NODES = ("deployment=multi_node", "deployment.gpus_per_node=2", "deployment.device=cpu")
LOOPBACK = "127.0.0.1"
NOISE = (
    *(
        b"1\n",
        b"null\n",
        b"[]\n",
        b'{"hello": 1}\n',
        b'{"hello": "x", "token": 7}\n',
        b'{"hello": 1, "token": "guess"}\n',
        b'{"hello": 1, "host": "h", "pid": 1, "nonce": "n", "proof": "\\ud800"}\n',
    ),
    *(b"\xff\xfe\n", b"GET / HTTP/1.1\r\n\r\n", b"[" * 5000 + b"\n", b"\n", b'{"nonce": "' + b"a" * 10_000),
)


def waiting_root(start: Start, *overrides: str) -> tuple[Root, int]:
    """A root that waits for an agent which somebody else will start, and the port where it does."""
    root = start(*TWO_NODES, *overrides, environment={KEY: BY_HAND})
    wait_for((root.run_dir / "nodes.json").exists)
    return root, json.loads((root.run_dir / "nodes.json").read_text())["port"]


def agent_for(root: Root) -> subprocess.Popen[bytes]:
    environment = os.environ | {KEY: BY_HAND, "PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    command = [sys.executable, "-m", "prl.runtime.agent", str(root.run_dir), "--node=1"]
    return subprocess.Popen(command, env=environment | {"ROLE_SCRIPT": "{}"}, stdin=subprocess.DEVNULL)


def test_what_strangers_say_does_not_end_the_start(start: Start) -> None:
    root, port = waiting_root(start)
    with contextlib.ExitStack() as stack:
        for noise in NOISE:
            stranger = stack.enter_context(socket.create_connection((LOOPBACK, port)))
            stranger.sendall(noise)
        time.sleep(0.5)
        assert root.process.poll() is None, root.wait()[1]
        agent = agent_for(root)
        code, output = root.wait()
    assert code == 0, output
    assert agent.wait(60) == 0


def test_silent_strangers_delay_nobody(start: Start) -> None:
    """Ten of them, at six seconds each, were a minute."""
    root, port = waiting_root(start)
    with contextlib.ExitStack() as stack:
        for _ in range(10):
            stack.enter_context(socket.create_connection((LOOPBACK, port)))
        began = time.monotonic()
        agent = agent_for(root)
        code, output = root.wait()
        took_s = time.monotonic() - began
    assert code == 0, output
    assert agent.wait(60) == 0
    assert took_s < 45


@contextlib.contextmanager
def door(token: str = "secret"):
    made = Door([LOOPBACK], token, 3, "marker")
    try:
        yield made
    finally:
        made.close()


def come(made: Door, node: int, token: str = "secret"):
    """An agent in a thread, the door in this one. Returns who arrived, and what the agent got or raised."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        connection = socket.create_connection((LOOPBACK, made.port))
        outcome = pool.submit(knock, connection, token, node, "host", 1, 60.0)
        arrived = []
        while not outcome.done():
            arrived += made.arrivals(0.02)
        return arrived, outcome.exception() or outcome.result()[1]


def test_who_knows_the_token_is_let_in_once() -> None:
    with door() as made:
        (arrival,), marker = come(made, 1)
        assert (arrival.node, arrival.host, marker) == (1, "host", "marker")
        assert come(made, 1) == ([], None), "told that it is not needed"
        assert come(made, 3) == ([], None)
        arrived, error = come(made, 2, token="guess")
        assert not arrived
        assert isinstance(error, ConnectionError)
        assert not made.strangers


def test_half_open_connections_are_bounded_and_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prl.runtime.nodes.door.HANDSHAKE_S", 1.0)
    with door() as made, contextlib.ExitStack() as stack:
        for _ in range(800):
            stack.enter_context(socket.create_connection((LOOPBACK, made.port)))
            made.arrivals(0)
        assert len(made.strangers) <= MAX_STRANGERS
        assert come(made, 1)[1] == "marker", "among them"
        time.sleep(1.1)
        made.arrivals(0)
        assert not made.strangers


def test_who_makes_room_for_another_in_the_same_moment_is_no_error() -> None:
    with door() as made, contextlib.ExitStack() as stack:

        def connect() -> socket.socket:
            return stack.enter_context(socket.create_connection((LOOPBACK, made.port)))

        oldest = connect()
        while len(made.strangers) < MAX_STRANGERS:
            made.arrivals(0.1)
            if len(made.strangers) < MAX_STRANGERS:
                connect()
        connect()
        oldest.sendall(b"x")
        assert made.arrivals(1) == []
        assert len(made.strangers) == MAX_STRANGERS


FIELDS = st.sampled_from(["hello", "host", "pid", "nonce", "proof", "x"])
VALUES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
OBJECTS = st.recursive(
    VALUES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(FIELDS, inner, max_size=6), max_leaves=8
)
SAID = st.one_of(st.binary(max_size=300), OBJECTS.map(lambda value: json.dumps(value).encode() + b"\n"))


@pytest.mark.parametrize("requests", [FEW * 4, pytest.param(MANY, marks=pytest.mark.exhaustive)])
def test_nothing_that_is_said_at_the_door_is_more_than_a_reason_to_hang_up(requests: int) -> None:
    with door() as made:
        before = Footprint.of()

        @many(requests)
        @given(said=SAID)
        def say(said: bytes) -> None:
            with socket.create_connection((LOOPBACK, made.port)) as stranger:
                while not made.strangers:
                    assert made.arrivals(0.5) == []
                stranger.sendall(said)
                assert [made.arrivals(0) for _ in range(3)] == [[]] * 3
            while made.strangers:
                assert made.arrivals(0.5) == []

        say()
        assert come(made, 1)[1] == "marker"
        assert Footprint.of().fds <= before.fds + 2


def test_a_wire_reads_from_a_descriptor_beyond_1023() -> None:
    """`select.select` does not; a root with many nodes or log files gets there."""
    with socket.create_server((LOOPBACK, 0)) as listener:
        near, (far, _) = socket.create_connection(listener.getsockname()), listener.accept()
    with near, far, socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 1100)) as high:
        Wire(far).send({"hello": 1})
        assert Wire(high).wait(60) == {"hello": 1}
