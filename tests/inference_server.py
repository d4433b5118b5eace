"""The built-in inference server in a thread of the test's process, and a client that blocks."""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from prl.config import compose
from prl.inference import server
from prl.inference.engine import TorchEngine
from prl.inference.guard import CLIENT_ROUTES
from prl.inference.sequences import Sequence
from prl.planning.planner import make_plan
from prl.planning.run_plan import RolePlan, RunPlan
from prl.runtime.process.keys import RunKeys
from prl.transport.answers import decode_answer

TOKEN, CONTROL = "run-token", "control-token"
ITS_OWN = "the key that the route wants"
LIMIT_S = 120.0  # for what takes a moment, on a busy machine


@dataclass
class ServerContext:
    """What the server uses of a ChildContext."""

    plan: RunPlan
    listen_socket: socket.socket
    run_dir: Path
    keys: RunKeys = field(default_factory=lambda: RunKeys(generate=TOKEN, control=CONTROL))
    shared_memory: str = field(default_factory=lambda: f"/dev/shm/prl-test{secrets.token_hex(4)}")
    endpoints: dict[str, str] = field(default_factory=dict)
    init_model_path: str | None = None
    stop_requested: bool = False
    restarts: int = 0
    beats: int = 0
    up: threading.Event = field(default_factory=threading.Event)

    @property
    def role(self) -> RolePlan:
        return self.plan.roles[0]

    def beat(self) -> None:
        self.beats += 1

    def ready(self) -> None:
        self.up.set()


@dataclass
class Reply:
    status: int
    body: Any


class HttpClient:
    """Calls from threads of its own, so that several can be under way at once. Each route gets the key it wants."""

    def __init__(self, port: int, control: str = CONTROL) -> None:
        self.port, self.control = port, control
        self.pool = ThreadPoolExecutor(64)

    def call(self, method: str, route: str, body: Any = None, key: str | None = ITS_OWN) -> Reply:
        data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{route}", data, method=method)
        request.add_header("Content-Type", "application/json")
        if key == ITS_OWN:
            key = TOKEN if route.partition("?")[0] in CLIENT_ROUTES else self.control
        if key is not None:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            return Reply(status, json.loads(text))
        except UnicodeDecodeError:  # no text at all
            return Reply(status, decode_answer(text))
        except ValueError:
            return Reply(status, text.decode())

    def get(self, route: str, **options: Any) -> Reply:
        return self.call("GET", route, **options)

    def post(self, route: str, body: Any = None, **options: Any) -> Reply:
        return self.call("POST", route, body, **options)

    def start_generate(self, request_id: str, **changes: Any) -> Future[Reply]:
        return self.pool.submit(self.generate, request_id, **changes)

    def generate(self, request_id: str = "r", token_ids: list[int] | None = None, **changes: Any) -> Reply:
        """Keyword arguments are sampling parameters, but for cache_salt and the like."""
        outer = {k: changes.pop(k) for k in ("cache_salt", "priority", "model", "return_token_ids") if k in changes}
        sampling = {"max_tokens": 8, "temperature": 1.0, "seed": 1, "ignore_eos": True, "logprobs": 0, **changes}
        ids = [258, 104, 105, 256, 259] if token_ids is None else token_ids
        body = {"request_id": request_id, "token_ids": ids, "sampling_params": sampling, **outer}
        return self.post("/inference/v1/generate", body)

    def metric(self, name: str) -> float:
        return sum(self.metrics(name).values())

    def metrics(self, name: str) -> dict[str, float]:
        """By name and labels."""
        lines = [line for line in self.get("/metrics").body.splitlines() if line.startswith(f"vllm:{name}{{")]
        return {label: float(value) for label, value in (line.rsplit(" ", 1) for line in lines)}

    def until(self, name: str, value: float) -> None:
        """Wait until a metric has a value."""
        deadline = time.monotonic() + LIMIT_S
        while self.metric(name) != value:
            assert time.monotonic() < deadline, f"{name} is {self.metric(name)}, not {value}"
            time.sleep(0.005)


class Client(HttpClient):
    """Of a server in this process: `ctx` is what it was given, `error` holds what it died of."""

    def __init__(self, ctx: ServerContext, error: list[BaseException]) -> None:
        super().__init__(ctx.listen_socket.getsockname()[1])
        self.ctx, self.error = ctx, error


@contextmanager
def slow_steps(seconds: float = 0.05) -> Iterator[None]:
    """Of all engines in this process: what a test does to running requests comes before their ends."""
    step = TorchEngine.step

    def slow(engine: TorchEngine) -> list[Sequence]:
        time.sleep(seconds)
        return step(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TorchEngine, "step", slow)
        yield


@contextmanager
def running_server(
    overrides: list[str], cache_dir: Path, wait: bool = True, job: str = "inference", restarts: int = 0
) -> Iterator[Client]:
    """A server with random weights, on its own or as in a run with trainer; `wait` until it is ready."""
    torch.set_num_threads(1)  # the engine shares the cores with the tests
    config = compose([f"cache_dir={cache_dir}", "deployment.device=cpu", *overrides], config_name="inference")
    plan = make_plan(config).model_copy(update={"config": config.model_copy(update={"job": job})})
    ctx = ServerContext(plan, socket.create_server(("127.0.0.1", 0)), cache_dir / "run", restarts=restarts)
    error: list[BaseException] = []

    def serve() -> None:
        try:
            server.main(ctx)  # type: ignore[arg-type]
        except BaseException as caught:
            error.append(caught)
            ctx.up.set()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    client = Client(ctx, error)
    try:
        if wait:
            assert ctx.up.wait(LIMIT_S)
        yield client
    finally:
        ctx.stop_requested = True
        thread.join(LIMIT_S)
        client.pool.shutdown(wait=False, cancel_futures=True)
        segment = Path(ctx.shared_memory)  # of a test's own publisher, which no reaper knows
        for left in segment.parent.glob(f"{segment.name}*"):
            left.unlink()
        assert not thread.is_alive()
