"""vLLM's own router (https://github.com/vllm-project/router) as a child of the process `router`."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import subprocess
import time
import urllib.request

from prl.config.errors import UserError
from prl.config.packages import ROUTER
from prl.config.schema import RunConfig
from prl.runtime.process.child import ChildContext
from prl.runtime.process.python_path import python_command

POLL_S = 0.1
PROBE_TIMEOUT_S = 1.0
STOP_TIMEOUT_S = 2.0


def is_installed() -> bool:
    return importlib.util.find_spec("vllm_router") is not None


def require() -> None:
    """Raises UserError unless it is installed."""
    if not is_installed():
        raise UserError(
            "vllm-router is not installed.",
            where="inference.router.type=vllm_router",
            why="it is an extra",
            fix=f"{ROUTER.install}, or inference.router.type=builtin",
        )


def command(config: RunConfig, host: str, port: int, metrics_port: int, engines: list[str]) -> list[str]:
    """Its command line (0.1.17).

    It gets no --api-key: it would put the key on what anybody sends it, control routes included, and asks nobody for
    one. Without, it hands on the client's own on generating routes and none on others, so that the engines decide.
    Its defaults would ask the same engine six times, and then keep a restarted one waiting for a minute.
    """
    router = config.inference.router
    options = {
        "host": host,
        "port": port,
        "policy": router.policy,
        "cache-threshold": router.cache_threshold,
        "balance-abs-threshold": router.balance_abs_threshold,
        "balance-rel-threshold": router.balance_rel_threshold,
        "request-timeout-secs": round(config.inference.request_timeout_s),
        "worker-startup-timeout-secs": round(config.deployment.start_timeout_s),
        "worker-startup-check-interval": 1,
        "health-check-interval-secs": 1,
        "health-failure-threshold": 1,
        "health-success-threshold": 1,
        "cb-failure-threshold": 1,
        "cb-success-threshold": 1,
        "cb-timeout-duration-secs": 2,
        "prometheus-port": metrics_port,
        "log-level": config.logging.level,
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return [*python_command("vllm_router.launch_router"), "--worker-urls", *engines, *flags]


def serve(ctx: ChildContext) -> None:
    """Run it until asked to stop. Raises RuntimeError when it ends by itself."""
    assert ctx.listen_socket is not None
    host, port = ctx.listen_socket.getsockname()[:2]
    ctx.listen_socket.close()  # it takes no socket, only a port
    engines = [ctx.endpoints[role.name] for role in ctx.plan.servers()]
    arguments = command(ctx.plan.config, host, port, free_port(), engines)
    print(" ".join(arguments), flush=True)
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL) as router:
        try:
            announced = False
            while not ctx.stop_requested:
                if router.poll() is not None:
                    raise RuntimeError(f"vllm-router ended with exit code {router.returncode}")
                ctx.beat()
                if not announced and answers(ctx.endpoints["router"]):
                    ctx.ready()
                    announced = True
                time.sleep(POLL_S)
        finally:
            router.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                router.wait(STOP_TIMEOUT_S)
            router.kill()


def answers(url: str) -> bool:
    """Whether it is up: before all engines are, it does not listen."""
    with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=PROBE_TIMEOUT_S) as response:
        return response.status == 200
    return False


def free_port() -> int:
    """For its metrics, which it serves at a fixed port unless told another."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]
