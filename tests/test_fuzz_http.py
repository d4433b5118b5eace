"""Every route of every HTTP server: whatever is sent, with or without keys, it answers and serves on.

In CI a few requests of each route, exhaustively 2,000 (`pytest -m exhaustive tests/test_fuzz_http.py`).
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from fuzzing import BEARER, FEW, MANY, Ask, Footprint, asks, many
from hypothesis import given
from hypothesis import strategies as st
from inference_server import CONTROL, LIMIT_S, TOKEN, running_server
from server_thread import in_thread
from watch_directory import make_run

from prl.config import compose
from prl.config.schema import RouterConfig
from prl.inference.guard import CLIENT_ROUTES, GENERATING_ROUTES, OPEN_ROUTES, Doors
from prl.inference.router.proxy import CONTROL_ROUTES, Router
from prl.inference.server import build_app
from prl.orchestrator.server import make_app, start_server
from prl.runtime.external import LEASE, RUN_HEADER
from prl.transport.frames import Message
from prl.watch.server import VIEWS
from prl.watch.server import make_app as make_page
from prl.watch.server import serve as serve_page
from prl.watch.store import Store

ROOT = Path(__file__).parent.parent

VLLM_ROUTES = (
    *GENERATING_ROUTES,
    *sorted(CLIENT_ROUTES - {*GENERATING_ROUTES, "/workers"}),
    LEASE,
    "/pause",
    "/sleep",
    "/collective_rpc",
)
TRAIN, PAGE = "train-key", "page-token"
pytestmark = pytest.mark.timeout(3600)
UNKNOWN = "/nothing"
PATHS = {  # of routes that match several
    "/{path}": (CONTROL_ROUTES[0], UNKNOWN),  # what the router refuses
    "/assets/{name}": ("/assets/watch.js", "/assets/x", "/assets/..%2fserver.py"),
    "/api/{view}": (*(f"/api/{view}" for view in VIEWS), "/api/x"),
}
TIERS = [
    pytest.param(FEW, id="few", marks=pytest.mark.slow),
    pytest.param(MANY, id="many", marks=pytest.mark.exhaustive),
]


@dataclass
class Target:
    """A server under fire: where it is, which keys there are, and how to see that it still serves."""

    port: int
    keys: tuple[str | None, ...]
    good: tuple[str, ...]  # keys that open something
    serves: Callable[[], None]
    footprint: Callable[[], Footprint] = Footprint.of
    bearer: str = BEARER  # how a key is shown
    faults: set[int] = field(default_factory=lambda: {500, 501, 502, 504})  # statuses that no request may cause

    def send(self, ask: Ask, key: str | None) -> int:
        """The status; 0 where the connection was closed without one."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(ask.to_bytes(key, self.bearer))
            answer = b""
            with contextlib.suppress(ConnectionError):
                while b"\r\n" not in answer and (piece := connection.recv(65536)):
                    answer += piece
                while answer.startswith(b"HTTP/1.1 100") and (piece := connection.recv(65536)):
                    answer = answer.partition(b"\r\n\r\n")[2] + piece
        return int(answer.split()[1]) if answer.startswith(b"HTTP/1.1 ") else 0

    def fire(self, route: str, requests: int, *, settled: bool = True) -> dict[int, int]:
        """Statuses and how often each came. Ends with a good request, and with no more open than before.

        settled: begins with a good request, too.
        """
        statuses: dict[int, int] = {}
        if settled:
            self.serves()
        before = self.footprint()

        @many(requests)
        @given(
            ask=asks(route, sorted(METHODS.get(route, {"POST"}))),
            key=st.sampled_from([*self.keys, *self.good, *self.good]),
        )
        def shoot(ask: Ask, key: str | None) -> None:
            status = self.send(ask, key)
            statuses[status] = statuses.get(status, 0) + 1
            assert status not in self.faults, ask
            if key not in self.good and route not in OPEN_ROUTES:
                assert not 200 <= status < 300, ask

        shoot()
        self.serves()
        self.settle(before)
        return statuses

    def settle(self, before: Footprint) -> None:
        deadline = time.monotonic() + LIMIT_S
        while (now := self.footprint()).fds > before.fds + 4 or now.threads > before.threads + 2:
            assert time.monotonic() < deadline, f"{before} became {now}"
            time.sleep(0.1)


# --- what there is ----------------------------------------------------------------------------------------------------


METHODS: dict[str, set[str]] = {}  # of each path, by any server's table


def routes_of(app: web.Application) -> list[str]:
    """A path or several of each route that a server has, by its own table, and one that it has not."""
    paths = {UNKNOWN: None}
    for route in app.router.routes():
        assert route.resource is not None
        for path in PATHS.get(route.resource.canonical, (route.resource.canonical,)):
            paths[path] = None
            if route.method not in ("*", "HEAD"):
                METHODS.setdefault(path, set()).add(route.method)
    return list(paths)


def engine_app(lease: bool) -> web.Application:
    """For its table alone: nothing of it is called."""
    nothing: Any = SimpleNamespace(settled=None, at_end=[])
    return build_app(nothing, compose([], "inference"), Doors(None), nothing, nothing if lease else None)


def router_to(port: int) -> Router:
    return Router(RouterConfig(), {"inference/0": f"http://127.0.0.1:{port}"}, TOKEN, Doors((TOKEN.encode(),)))


ENGINE_ROUTES, LEASED_ROUTES = routes_of(engine_app(lease=False)), routes_of(engine_app(lease=True))
SERVERS = {  # modules that serve HTTP -> the test that sends them anything
    "prl/inference/server.py": "test_the_engine, test_a_leased_engine",
    "prl/inference/router/server.py": "test_the_router",
    "prl/orchestrator/server.py": "test_the_orchestrator",
    "prl/watch/server.py": "test_the_page",
    "prl/envs/worker.py": "test_fuzz_env.py",
}


def test_no_server_is_forgotten() -> None:
    serving = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "prl").rglob("*.py")
        if "await start_serving(" in path.read_text()
    }
    assert serving == set(SERVERS)
    assert set(LEASED_ROUTES) == {*ENGINE_ROUTES, LEASE}
    dynamic = [route for route in (*LEASED_ROUTES, *ROUTER_ROUTES, *TRAINER_ROUTES, *PAGE_ROUTES) if "{" in route]
    assert not dynamic, "PATHS says what to ask of them"


# --- the built-in engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with running_server(
        ["inference.max_num_seqs=8", "inference.max_model_len=64"], tmp_path_factory.mktemp("cache"), job="rl"
    ) as client:

        def serves() -> None:
            """Whatever was asked of control before: awake and going on, with the weights that it had."""
            assert client.post("/wake_up").status == 200
            assert client.post("/resume").status == 200
            reply = client.generate(max_tokens=3)
            assert reply.status == 200, reply
            assert not client.error
            client.until("num_requests_running", 0)  # who hung up takes its request along

        yield Target(client.port, (None, "guess", "küy\udcff", TOKEN, CONTROL), (TOKEN, CONTROL), serves)


@pytest.mark.parametrize("requests", TIERS)
@pytest.mark.parametrize("route", ENGINE_ROUTES)
def test_the_engine(engine: Target, route: str, requests: int) -> None:
    statuses = engine.fire(route, requests)
    if route in GENERATING_ROUTES and requests == MANY:
        assert statuses[200] > requests / 20, "enough of them were good"
        assert statuses[400] > requests / 20


# --- one that a run may take ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def leased_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    sizes, cache = ["inference.max_num_seqs=8", "inference.max_model_len=64"], tmp_path_factory.mktemp("leased")
    (cache / "run").mkdir()  # where the lease is kept
    with running_server(sizes, cache, job="inference") as client:

        def serves() -> None:
            """Whoever has it gives it up."""
            told = client.get(LEASE)
            assert told.status == 200, told
            if told.body["lease"] is not None:
                freed = target.send(Ask("DELETE", LEASE, ((RUN_HEADER, told.body["lease"]["run"]),), b""), CONTROL)
                assert freed == 200
            assert client.post("/wake_up").status == client.post("/resume").status == 200
            assert client.generate(max_tokens=3).status == 200
            assert not client.error
            client.until("num_requests_running", 0)

        # sampling is open to this machine, without a key, too
        target = Target(client.port, (None, "guess", "küy\udcff"), (CONTROL,), serves)
        yield target


@pytest.mark.parametrize("requests", TIERS)
@pytest.mark.parametrize("route", [route for route in LEASED_ROUTES if route not in CLIENT_ROUTES])
def test_a_leased_engine(leased_engine: Target, route: str, requests: int) -> None:
    leased_engine.serves()
    weights = {"transport": "filesystem", "directory": "/r", "hosts": [], "timeout_s": 1.0}
    claim = {"run": "r", "life": "0", "host": "h", "weights": weights}
    assert leased_engine.send(Ask("POST", LEASE, (), json.dumps(claim).encode()), CONTROL) == 200
    statuses = leased_engine.fire(route, requests, settled=False)
    if route == LEASE and requests == MANY:
        assert statuses[200] > requests / 20
        assert statuses[400] > requests / 20


# --- the router -------------------------------------------------------------------------------------------------------


ROUTER_ROUTES = routes_of(router_to(0).app())


@pytest.fixture(scope="module")
def router(engine: Target) -> Iterator[Target]:
    with in_thread(router_to(engine.port).app()) as port:
        good = Ask(
            "POST",
            "/inference/v1/generate",
            (),
            json.dumps({"token_ids": [1], "sampling_params": {"max_tokens": 2}}).encode(),
        )
        target = Target(port, (None, "guess", TOKEN), (TOKEN,), lambda: None)

        def serves() -> None:
            deadline = time.monotonic() + LIMIT_S
            while target.send(good, TOKEN) != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)

        target.serves = serves
        yield target


@pytest.mark.parametrize("requests", TIERS)
@pytest.mark.parametrize("route", ROUTER_ROUTES)
def test_the_router(router: Target, route: str, requests: int) -> None:
    statuses = router.fire(route, requests)
    assert not any(status == 503 for status in statuses), "no request may put a replica in a bad light"


# --- the orchestrator's routes for trainers ---------------------------------------------------------------------------


class Service:
    """Takes what a trainer would say, if it is typed as it should be."""

    def __init__(self) -> None:
        self.failed: list[Exception] = []

    async def batch_for(self, step: int, data_rank: int, publications: int, timeout_s: float) -> Message | None:
        assert all(type(number) is int and number >= 0 for number in (step, data_rank, publications))
        return Message([memoryview(b"batch")])

    async def weights_published(self, publication: int, version: int, update_info: dict[str, object]) -> None:
        assert type(publication) is type(version) is int
        assert isinstance(update_info, dict)

    async def turn_reached(self, publication: int, timeout_s: float) -> bool:
        assert type(publication) is int
        return True

    async def weights_delivered(self, publication: int, timeout_s: float) -> bool | None:
        assert type(publication) is int
        return True

    async def trainer_checkpointed(self, step: int, in_haste: bool) -> None:
        assert type(step) is int
        assert type(in_haste) is bool

    async def checkpoint_committed(self, step: int, timeout_s: float) -> float | None:
        assert type(step) is int
        return 0.5

    async def trainer_done(self, step: int) -> None:
        assert type(step) is int

    def fail(self, error: Exception) -> None:
        self.failed.append(error)


TRAINER_ROUTES = routes_of(make_app(Service(), TRAIN))


@pytest.fixture(scope="module")
def trainers() -> Iterator[Target]:
    service = Service()

    async def start(listener: socket.socket) -> Any:
        return await start_server(service, listener, TRAIN)

    with in_thread(start) as port:
        target = Target(port, (None, "guess", "küy\udcff", TRAIN), (TRAIN,), lambda: None)

        def serves() -> None:
            assert not service.failed, "no request ends a run"
            assert target.send(Ask("GET", "/train/batch?step=1&data_rank=0&publications=0", (), b""), TRAIN) == 200

        target.serves = serves
        yield target


@pytest.mark.parametrize("requests", TIERS)
@pytest.mark.parametrize("route", TRAINER_ROUTES)
def test_the_orchestrator(trainers: Target, route: str, requests: int) -> None:
    trainers.fire(route, requests)


# --- the page of prl.watch --------------------------------------------------------------------------------------------

PAGE_ROUTES = routes_of(make_page(Store(ROOT / "outputs"), PAGE))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    root = tmp_path_factory.mktemp("watched")
    make_run(root / "sweeps/s/a", {"seed": "1"})

    async def start(listener: socket.socket) -> Any:
        return await serve_page(Store(root), PAGE, listener)

    with in_thread(start) as port:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        link.request("GET", f"/?token={PAGE}")
        cookie = str(link.getresponse().getheader("Set-Cookie")).partition("=")[0]
        link.close()
        target = Target(port, (None, "guess", "küy\udcff"), (PAGE,), lambda: None, bearer=f"Cookie: {cookie}=")

        def serves() -> None:
            for path in ("/", "/assets/watch.js", "/api/overview", "/api/run?run=sweeps/s/a"):
                assert target.send(Ask("GET", path, (), b""), PAGE) == 200, path

        target.serves = serves
        yield target


@pytest.mark.parametrize("requests", TIERS)
@pytest.mark.parametrize("route", PAGE_ROUTES)
def test_the_page(page: Target, route: str, requests: int) -> None:
    page.fire(route, requests)


# --- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vllm(plain_vllm: Any) -> Target:
    def serves() -> None:
        assert plain_vllm.http.generate(max_tokens=3).status == 200

    family = plain_vllm.process.children(recursive=True)
    pids = [child.pid for child in family if "inference/0" in " ".join(child.cmdline())]
    # 500 and 501: vLLM's own answers to what it does not have; that it serves on is what counts
    return Target(
        plain_vllm.http.port, (None, TOKEN), (TOKEN,), serves, lambda: Footprint.of(pids[0]), faults={502, 504}
    )


@pytest.mark.vllm
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
@pytest.mark.parametrize("requests", TIERS)
@pytest.mark.parametrize("route", VLLM_ROUTES)
def test_vllm(vllm: Target, route: str, requests: int) -> None:
    statuses = vllm.fire(route, requests)
    print(route, statuses)
    if route in ("/pause", "/sleep", "/collective_rpc"):
        assert set(statuses) <= {0, 400, 401, 405}, statuses
