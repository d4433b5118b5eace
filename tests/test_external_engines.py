"""inference.urls: runs on engines that somebody else has started, as a user starts both."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from runs import UNEVALUATED, environment, finish, rows, run, start, wait_for, wait_for_step

from launch.shapes import refuse_loopback_engines
from prl.config import compose
from prl.config.errors import ConfigError, UserError
from prl.metrics.writer import MetricsWriter
from prl.orchestrator.engines.external import ExternalEngines
from prl.planning import make_plan
from prl.planning.render import render_plan
from prl.runtime import external
from prl.runtime.directory.status_file import read_status
from prl.runtime.external import LEASE, check_engines
from prl.runtime.people.view import RunView

VARIABLE, KEY = "PRL_TEST_CONTROL", "0123456789abcdef"
ELSEWHERE = ["inference.urls=[http://10.1.2.3:8000]", f"inference.control_key_var={VARIABLE}"]
ONE_THREAD = ["deployment.device=cpu", "debug.num_threads=1"]


# --- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_has_no_processes_and_no_devices_for_them() -> None:
    plan = make_plan(compose([*ELSEWHERE, "parallelism=fsdp"]))
    assert plan.roles_of("inference") == ()
    assert {role.role for role in plan.roles} == {"orchestrator", "trainer", "env"}
    trainers = plan.roles_of("trainer")
    assert [role.devices for role in trainers] == [(index,) for index in range(len(trainers))]
    assert "http://10.1.2.3:8000: they run already" in render_plan(plan)


def test_a_job_on_a_cluster_does_not_take_engines_on_loopback() -> None:
    class Point:
        def __init__(self, url: str) -> None:
            self.plan = make_plan(compose([f"inference.urls=[{url}]", ELSEWHERE[1]]))

    refuse_loopback_engines([Point("http://10.1.2.3:8000")])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="does not reach http://localhost:1"):
        refuse_loopback_engines([Point("http://localhost:1")])  # type: ignore[list-item]


# --- who is asked -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def answering(routes: dict[str, tuple[int, object]]):
    """A server of somebody's: path -> status and JSON; 404 for all others. Yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = routes.get(self.path, (404, {"detail": "Not Found"}))
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def ask(url: str, *overrides: str, run_id: str = "mine", said: list[str] | None = None) -> list[str]:
    """What a run that begins says of it, also where it raises UserError."""
    said = [] if said is None else said
    config = compose([f"inference.urls=[{url}]", ELSEWHERE[1], *overrides])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, KEY)
        check_engines(config, run_id, said.append, lambda: False)
    return said


def facts(*overrides: str, **changes: object) -> dict[str, object]:
    return external.model_facts(compose(list(overrides), "inference")) | {"lease": None} | changes


def test_an_engine_that_fits_is_taken() -> None:
    with answering({LEASE: (200, facts())}) as url:
        assert ask(url) == []


def test_one_engine_under_two_addresses_is_told_before_anything_starts() -> None:
    """The grant of a lease tells it, too, of an engine that was away when the run began."""
    with answering({LEASE: (200, facts(server="abc"))}) as url:
        other = url.replace("127.0.0.1", "localhost")
        with pytest.raises(UserError, match=f"{url} and {other} are the same engine"):
            ask(f"{url},{other}")
        with answering({LEASE: (200, facts(server="def"))}) as another:
            assert ask(f"{url},{another}") == []


def test_a_lease_that_two_addresses_grant_alike_is_one_engine() -> None:
    config = compose(["inference.urls=[http://10.1.2.3:1,http://10.1.2.3:2]", ELSEWHERE[1]])

    async def renewed() -> None:
        engines = object.__new__(ExternalEngines)
        engines.config, engines.claim, engines.answered, engines.grants = config, {}, [0.0, 0.0], ["g", None]
        async with aiohttp.ClientSession() as session:
            engines.pool = SimpleNamespace(urls=[first, second], session=session, control={})
            assert await engines._renew(0) == "g"
            await engines._renew(1)

    granted = {LEASE: (200, facts(grant="g"))}
    with answering(granted) as first, answering(granted) as second, pytest.raises(UserError, match="the same engine"):
        asyncio.run(renewed())


@pytest.mark.parametrize(
    ("routes", "what", "remedy"),
    [
        ({"/v1/models": (200, {"data": []})}, "evaluation, and as a teacher, only", "python -m prl.inference"),
        (
            {"/v1/models": (401, {})},
            "evaluation, and as a teacher, only",
            f"inference.control_key_var={VARIABLE}; or with vLLM and our plugin, by inference=vllm in both commands",
        ),
        ({}, "is no inference engine", "address of an engine"),
        ({LEASE: (200, {"hello": 1})}, "is no inference engine", "address of an engine"),
        ({"/workers": (200, {"workers": []})}, "is a router", "engines behind it"),
        ({path: (200, [1, 2]) for path in (LEASE, "/workers", "/v1/models")}, "is no inference engine", "address of"),
        ({LEASE: (401, {})}, "does not take the control key", f"inference.control_key_var={VARIABLE}"),
        ({LEASE: (200, facts("model=tiny_qwen3"))}, "another model", "same model="),
        ({LEASE: (200, facts("inference.max_model_len=128"))}, "takes 128 tokens", "inference.max_model_len=128"),
        ({LEASE: (200, facts(dtype="bfloat16"))}, "dtype=bfloat16", "inference.dtype=bfloat16"),
        ({LEASE: (200, facts(engine="vllm"))}, "engine=vllm", "inference=vllm"),
    ],
)
def test_who_cannot_serve_a_run_is_refused_by_name(routes, what, remedy) -> None:
    with answering(routes) as url, pytest.raises(UserError, match=what) as refused:
        ask(url)
    assert url in refused.value.what
    assert remedy in refused.value.fix


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "nobody listens there"),
        ((500, {"error": {"message": "out of\nluck"}}), "it answered /lease by 500: out of\nluck"),
        ((409, facts(lease={"run": "theirs", "host": "h"})), "it is held by another run: theirs on h"),
        ((404, {}), "it is no inference engine"),
        ((200, facts("model=tiny_llama") | {"grant": "g"}), "it holds another model: tiny_llama"),
        ((200, facts() | {"grant": "other"}), "it was started again, or our lease had run out"),
    ],
)
def test_the_loss_of_an_engine_is_one_sentence_that_says_how_it_goes_on(tmp_path, monkeypatch, answer, said) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    monkeypatch.setattr("prl.orchestrator.engines.external.RENEW_S", 0.05)
    monkeypatch.setattr("prl.orchestrator.engines.external.PATIENCE_S", 0.0)
    routes: dict[str, tuple[int, object]] = {LEASE: (200, facts() | {"grant": "g"})}

    async def lose(url: str, server: contextlib.ExitStack) -> None:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            silent = f"http://127.0.0.1:{nobody.getsockname()[1]}"
            plan = make_plan(compose([f"inference.urls=[{url},{silent}]", ELSEWHERE[1]]))
            metrics = MetricsWriter(tmp_path, "orchestrator")
            ctx = SimpleNamespace(
                **{"plan": plan, "run_id": "mine", "run_dir": tmp_path, "metrics": metrics},
                endpoints={"rendezvous": "127.0.0.1:1"},
            )
            engines = ExternalEngines(ctx)  # type: ignore[arg-type]
            view = RunView(plan, tmp_path)
            await engines.take()
            if answer is None:
                server.close()
            else:
                routes[LEASE] = answer
            keep = asyncio.create_task(engines._keep(0))
            while len(view.lost_engines) < 2 and not keep.done():
                await asyncio.sleep(0.05)
                view.poll()
            keep.cancel()
            await asyncio.wait([keep])
            await engines.pool.close()
        words = "model=tiny_qwen3_moe model.dtype=float32 inference.max_model_len=256"
        command = f"(to start it: python -m prl.inference {words} inference.port="
        ways = [f"{command}{at.rpartition(':')[2]} inference.control_key_var={VARIABLE})" for at in (silent, url)]
        others = "the run goes on with the others, and takes it in again when it can serve"
        alone = "the run waits for it, 300 s at most"
        assert view.take_told() == [
            f"{silent} is left out: it has not answered yet; {others} {ways[0]}",
            f"{url} is left out: {said}; {alone} {ways[1]}",
            f"{silent} is left out: it has not answered yet; {alone} {ways[0]}",
        ]

    with contextlib.ExitStack() as server:
        asyncio.run(lose(server.enter_context(answering(routes)), server))


def test_nobody_at_all_is_told_with_the_urls() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        said: list[str] = []
        with pytest.raises(UserError, match="No engine answers") as refused:
            ask(url, said=said)
        assert url in refused.value.what
        assert said == [], "nobody waits for it"
        with answering({LEASE: (200, facts())}) as other:
            assert ask(f"{url},{other}") == [f"{url}: no answer; the run takes it in when it comes"]


@contextlib.contextmanager
def saying(first: bytes, then: bytes = b"", times: int = 0):
    """Who takes connections and says this, and then something every 0.1 s. Yields its URL."""
    over = threading.Event()

    def serve(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.sendall(first)
            for _ in range(times):
                if over.wait(0.1):
                    return
                connection.sendall(then)
            if then:
                over.wait()

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        over.set()
        listening.shutdown(socket.SHUT_RDWR)


def test_who_speaks_no_http_is_no_engine() -> None:
    with saying(b"\xff\xfe hello\r\n\r\n") as url, pytest.raises(UserError, match="is no inference engine") as refused:
        ask(url)
    assert "does not speak HTTP" in refused.value.why


SLOW = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"x", 10_000


def test_an_answer_that_never_ends_is_waited_for_as_long_as_a_start(monkeypatch) -> None:
    monkeypatch.setattr(external, "ANSWER_S", 0.5)
    said: list[str] = []
    with saying(*SLOW) as url, pytest.raises(UserError, match="No engine has answered for 1 s") as refused:
        ask(url, "deployment.start_timeout_s=1", said=said)
    assert "takes connections" in refused.value.why
    assert said == [f"{url}: takes connections, but does not answer yet"]


def test_who_stops_a_run_waits_for_no_answer(monkeypatch) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    began = time.monotonic()
    with saying(*SLOW) as url:
        config = compose([f"inference.urls=[{url}]", ELSEWHERE[1]])
        check_engines(config, "mine", lambda text: None, lambda: time.monotonic() - began > 0.3)
    assert time.monotonic() - began < 3


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_ports_that_there_are_not_are_refused_with_the_configuration(port: int) -> None:
    with pytest.raises(UserError, match="65535"):
        compose([f"inference.urls=[http://127.0.0.1:{port}]", ELSEWHERE[1]])
    assert compose(["inference.urls=[http://127.0.0.1:65535]", ELSEWHERE[1]]).inference.urls


def test_an_unset_key_is_told(monkeypatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(UserError, match=f"{VARIABLE} is not set"):
        check_engines(compose(ELSEWHERE), "mine", print, lambda: False)


def test_engines_of_a_run_that_lives_are_not_taken_and_of_one_that_died_are_waited_for() -> None:
    lease = {"run": "other", "host": "h", "renewals": 1, "expires_in_s": 30.0}
    alive = facts(lease=lease)
    with answering({LEASE: (200, alive)}) as url:
        assert ask(url, run_id="other") == []
        turn = threading.Timer(0.5, lambda: lease.update(renewals=2))
        turn.start()
        with pytest.raises(UserError, match="held by another run: other on h"):
            ask(url)
        turn = threading.Timer(0.5, lambda: alive.update(lease=None))
        turn.start()
        assert "waiting whether that is alive" in ask(url)[0]


# --- whole runs -------------------------------------------------------------------------------------------------------


class Server:
    """`python -m prl.inference`, on a port that it keeps over restarts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count = folder, 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = environment() | {VARIABLE: KEY}
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        self.count += 1
        out = self.folder / f"engine-{self.count}"
        args = [f"inference.port={self.port}", ELSEWHERE[1], f"cache_dir={self.folder / 'cache'}", *ONE_THREAD]
        self.process = start([*args, f"output_dir={out}"], self.folder, "prl.inference", self.env)
        wait_for(self.process, lambda: read_status(out).get("state") == "running", "server", 200)

    def kill(self) -> None:
        """All of it, at once, as a machine that fails."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None
            wait_until(lambda: not self.listens(), "end of the server")

    def listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def get(self, route: str) -> dict:
        request = urllib.request.Request(self.url + route, headers={"Authorization": f"Bearer {KEY}"})
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def arguments(self, out: Path, *more: str) -> list[str]:
        small = [*UNEVALUATED, f"cache_dir={self.folder / 'cache'}", *ONE_THREAD]
        return [f"inference.urls=[{self.url}]", ELSEWHERE[1], *small, f"output_dir={out}", *more]


def wait_until(condition, what: str, timeout_s: float = 200) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} after {timeout_s} s"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def only_server(tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("engine"))
    try:
        yield made
    finally:
        made.kill()


@pytest.fixture
def server(only_server):
    """One of all tests, up again after those that kill it."""
    if not only_server.listens():
        only_server.start()
    return only_server


@pytest.mark.slow
def test_a_run_trains_on_a_server_that_runs_already(server, tmp_path) -> None:
    """Every step samples from the weights of the step before, to rounding; two runs do not share an engine, and the
    next one gets it as it is after the first.
    """
    out, other = tmp_path / "a", tmp_path / "b"
    first = start(server.arguments(out, "algo=sync", "max_steps=1000"), tmp_path, env=server.env)
    try:
        wait_for_step(first, out, 1)
        refused = run(server.arguments(other, "max_steps=2"), tmp_path, env=server.env)
        wait_for_step(first, out, 3)
        first.send_signal(signal.SIGTERM)
        stopped = finish(first)
    finally:
        first.kill()
    assert refused.code == 2, refused.output
    assert "is held by another run" in refused.output
    assert not other.exists()
    assert stopped.code == 143, stopped.output
    kl = [row["mismatch_kl_mean"] for row in rows(out, "trainer.0") if "mismatch_kl_mean" in row]
    assert len(kl) >= 3
    assert max(kl) < 1e-9
    assert server.get(LEASE)["lease"] is None
    assert server.get("/is_paused") == {"is_paused": False}
    done = run(server.arguments(other, "max_steps=2"), tmp_path, env=server.env)
    assert done.code == 0, done.output
    first_step = next(row for row in rows(other, "trainer.0") if "mismatch_kl_mean" in row)
    assert first_step["mismatch_kl_mean"] < 1e-9
    assert server.get("/weight_info") == {"weight_version": "2"}


@pytest.mark.slow
def test_an_engine_that_is_started_again_is_taken_back_in(server, tmp_path) -> None:
    """Nothing is sampled from what it has before it has the run's weights; a run that is killed leaves it unpaused."""
    out = tmp_path / "run"
    training = start(server.arguments(out, "max_steps=1000", "weight_transport=tcp"), tmp_path, env=server.env)
    try:
        wait_for_step(training, out, 2)
        server.kill()
        server.start()
        reached = max(row["step"] for row in rows(out, "trainer.0"))
        wait_for_step(training, out, reached + 4)
        training.send_signal(signal.SIGTERM)
        stopped = finish(training)
    finally:
        training.kill()
    assert stopped.code == 143, stopped.output
    steps = [row for row in rows(out, "trainer.0") if "mismatch_kl_mean" in row]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    assert max(row["staleness_max"] for row in rows(out, "orchestrator") if "staleness_max" in row) <= 2
    assert max(row["engine_restarts"] for row in rows(out, "orchestrator") if "engine_restarts" in row) == 1
    assert server.get(LEASE)["lease"] is None
    assert server.get("/is_paused") == {"is_paused": False}


@pytest.mark.slow
def test_a_run_without_engines_ends_after_a_time_and_names_them(server, tmp_path) -> None:
    out = tmp_path / "run"
    more = ["max_steps=1000", "deployment.start_timeout_s=25"]
    training = start(server.arguments(out, *more), tmp_path, env=server.env)
    try:
        wait_for_step(training, out, 1)
        server.kill()
        ended = finish(training)
    finally:
        training.kill()
    assert ended.code == 2, ended.output
    assert "No engine has answered for 25 s" in ended.output
    assert server.url in ended.output
    (saved,) = (out / "checkpoints").iterdir()  # what was trained is not lost with the engines
    assert f"the checkpoint of {saved.name.replace('_', ' ')} is kept" in ended.output
