"""A plain `vllm serve` that takes weights from a run: an ASGI middleware of ours in front of its application.

    export PRL_CONTROL_KEY=... VLLM_SERVER_DEV_MODE=1
    vllm serve MODEL --middleware prl.inference.vllm.stock.Leased --weight-transfer-config '{"backend": "prl"}' ...

The plugin (`plugin.py`) says in time to all processes of this vLLM where the lease is kept; this is made when its
server begins, asks it what it was started with, and puts the same guard and lease before it as `python -m
prl.inference` does.
What is missing ends the server before it listens, with the words to add.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.platforms import current_platform

from prl.config import ConfigError, compose
from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.schema import RunConfig
from prl.inference.guard import Doors
from prl.inference.lease import Lease
from prl.inference.vllm.flat_logprobs import answer_flat
from prl.inference.vllm.guarding import Guard
from prl.inference.vllm.plugin import KEY
from prl.inference.vllm.server import FIRST_VERSION, check_capture, check_family, check_form
from prl.inference.vllm.versions import is_old, name_first_weights
from prl.models.checkpoints.sources import resolve_model_path
from prl.planning.vllm_arguments import BACKEND, config_overrides
from prl.runtime.process.keys import bears
from prl.transport.sources import VARIABLE, WeightSource

TICK_S = 0.5
PLACE = "vllm serve --middleware prl.inference.vllm.stock.Leased"


class Leased:
    """ASGI: vLLM's application behind keys, bounds and a lease."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.guard: Guard | None = None
        self.ticking: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.guard is None:
            try:
                self.guard = await self._begin(scope["app"].state)
            except (UserError, ConfigError) as error:
                if scope["type"] != "lifespan":
                    raise
                await receive()
                return await send({"type": "lifespan.startup.failed", "message": f"\n{error.render()}"})
        await self.guard(scope, receive, send)

    async def _begin(self, state: Any) -> Guard:
        """Raises UserError or ConfigError for a server that could not serve a run."""
        args, engine = state.args, state.engine_client
        check_started(args, engine.vllm_config, os.environ)
        config = config_of(args, engine.vllm_config)
        check_family(config)
        check_capture(config.inference.return_routed_experts)
        check_form(config, resolve_model_path(config.model, Path(config.cache_dir)))
        check_overrides(args, config)
        await name_first_weights(engine, FIRST_VERSION)
        if (handler := getattr(state, "serving_tokens", None)) is not None:
            answer_flat(handler)
        source = WeightSource.from_environment()
        lease = Lease(config, source, engine.resume_generation)
        clients = tuple(key.encode() for key in (args.api_key or [os.environ.get("VLLM_API_KEY")]) if key)
        control = os.environ[KEY].strip().encode()
        self.ticking = asyncio.create_task(_tick(lease))
        atexit.register(Path(source.leased).unlink, missing_ok=True)
        # without a key of vLLM's clients need the control key: vLLM may listen beyond this machine
        doors = Doors(clients or (control,), (control,))
        app = AsClient(self.app, doors) if clients else self.app
        return Guard(app, doors, source, config, has_weights=True, lease=lease)


class AsClient:
    """ASGI: who came in with the control key bears vLLM's own key from here on, for vLLM asks for it itself."""

    def __init__(self, app: ASGIApp, doors: Doors) -> None:
        assert doors.clients
        self.app, self.doors, self.bearer = app, doors, f"Bearer {doors.clients[0].decode()}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_request = scope["type"] == "http"
        if is_request and bears(Headers(scope=scope).get("authorization", ""), self.doors.control):
            headers = MutableHeaders(raw=list(scope["headers"]))
            headers["authorization"] = self.bearer
            scope = {**scope, "headers": headers.raw}
        await self.app(scope, receive, send)


async def _tick(lease: Lease) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        await lease.tick()


def check_started(args: Namespace, vllm_config: Any, environment: Any) -> None:
    """Raises UserError with what `vllm serve` was not told that a run needs."""
    missing = [f"export {KEY}=$(openssl rand -hex 16)"] * (not environment.get(KEY, "").strip())
    missing += ["export VLLM_SERVER_DEV_MODE=1"] * (environment.get("VLLM_SERVER_DEV_MODE") != "1")
    transfer = getattr(vllm_config, "weight_transfer_config", None)
    wanted = {
        "--weight-transfer-config '" + json.dumps({"backend": BACKEND}) + "'": getattr(transfer, "backend", "")
        == BACKEND,
        "--logprobs-mode processed_logprobs": str(vllm_config.model_config.logprobs_mode) == "processed_logprobs",
        "--enable-scale-out": is_old() or bool(getattr(args, "enable_scale_out", False)),
        "--enable-server-load-tracking": bool(args.enable_server_load_tracking),
        "--api-server-count 1": (args.api_server_count or 1) == 1,
        "--no-enable-chunked-prefill": not current_platform.is_cpu()
        or not vllm_config.scheduler_config.enable_chunked_prefill,
    }
    missing += [flag for flag, given in wanted.items() if not given]
    if missing:
        raise UserError(
            f"This vLLM was not started as a run needs it: {len(missing)} of its settings.",
            where=PLACE,
            why="weights come in by our weight transfer and routes of vLLM's development mode; tokens go out by "
            "/inference/v1/generate, with log-probabilities of the distribution sampled from; one server has the lease",
            fix="add " + "  ".join(missing),
        )
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size_local < parallel.data_parallel_size or parallel.nnodes > 1:
        raise UserError(
            "An engine over several nodes takes weights from a run only where prl starts it.",
            where=PLACE,
            why="its processes on other nodes do not see which run has its lease",
            fix="python -m prl.inference inference=vllm deployment=multi_node, or an engine on each node",
        )
    if VARIABLE not in environment:
        raise UserError(
            "This vLLM has not loaded our plugin.",
            where=f"{PLACE}, VLLM_PLUGINS={environment.get('VLLM_PLUGINS', '')}",
            why="it makes our weight transfer known to each of vLLM's processes",
            fix="pip install --no-deps -e . of this package into vLLM's environment; VLLM_PLUGINS unset, or with prl",
        )


def config_of(args: Namespace, vllm_config: Any) -> RunConfig:
    """The configuration of `prl.inference` that this server is like. Raises ConfigError for models not known here."""
    model = vllm_config.model_config
    says = {
        "model.path": str(args.model),
        "model.dtype": str(model.dtype).removeprefix("torch."),
        "inference.max_model_len": model.max_model_len,
        "inference.return_routed_experts": bool(getattr(model, "enable_return_routed_experts", False)),
        "deployment.device": "cpu" if current_platform.is_cpu() else "cuda",
    }
    return compose(["model=auto", "inference=vllm", *(f"{key}={as_override(value)}" for key, value in says.items())],
                   "inference")  # fmt: skip


def check_overrides(args: Namespace, config: RunConfig) -> None:
    """Raises UserError where vLLM would compute otherwise than the trainer unless told so."""
    given = args.hf_overrides if isinstance(args.hf_overrides, dict) else {}
    if wanted := {key: value for key, value in config_overrides(config).items() if given.get(key) != value}:
        raise UserError(
            "This vLLM would not compute as the trainer does.",
            where=f"{PLACE}, {config.model.card.family}",
            why="of this family it reads in config.json how routers and indexers compute, and needs to be told",
            fix=f"add --hf-overrides '{json.dumps(given | wanted)}'",
        )
    if current_platform.is_cpu() and config.model.card.kv_lora_rank:
        raise UserError(
            "vLLM's own defaults are wrong for latent attention on CPUs.",
            where=f"{PLACE}, {config.model.card.family}",
            why="its rotary operator for CPUs gives other numbers (prl/inference/vllm/README.md)",
            fix="python -m prl.inference inference=vllm, which tells it so; or a GPU",
        )
