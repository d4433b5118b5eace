"""The built-in engine behind vLLM's HTTP routes (vLLM 0.32), on aiohttp."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from aiohttp import web
from aiohttp.typedefs import Middleware

from prl.config.config_json import check_card
from prl.config.schema import RunConfig
from prl.config.world import world_of
from prl.inference.chat_route import add_chat_routes
from prl.inference.control_routes import add_control_routes
from prl.inference.engine import TorchEngine
from prl.inference.errors import error_body
from prl.inference.generate_route import add_generate_route
from prl.inference.guard import OPEN_ROUTES, Doors, doors_of, refusal
from prl.inference.lease import Lease
from prl.inference.metrics_route import add_metrics_route
from prl.inference.reporting import report
from prl.inference.requests import read_object
from prl.inference.weight_routes import add_weight_routes
from prl.inference.worker import EngineWorker
from prl.models.checkpoints.reading import load_model
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.device import limit_memory, pick_device
from prl.models.text.chat import ChatRenderer
from prl.models.text.tokenizer import eos_of, load_tokenizer
from prl.runtime.external import LEASE, RUN_HEADER
from prl.runtime.process.child import ChildContext
from prl.transport.serving import start_serving
from prl.transport.sources import WeightSource

log = logging.getLogger("prl.inference")

# a client that goes away takes its generation along; what changes the engine's state is always carried through
GENERATING_ROUTES = ("/inference/v1/generate", "/v1/chat/completions")


def main(ctx: ChildContext) -> None:
    """Entry of `inference/<i>`, whichever engine it is."""
    if ctx.plan.config.inference.engine == "vllm":
        from prl.inference.vllm.launch import launch

        launch(ctx)
    else:
        asyncio.run(serve(ctx))


async def serve(ctx: ChildContext) -> None:
    """Serve until asked to stop; /health answers 503 while the model loads. Raises what the engine died of."""
    config = ctx.plan.config
    if config.debug.deterministic:
        torch.use_deterministic_algorithms(True)

    def load() -> tuple[TorchEngine, ChatRenderer]:
        engine, renderer = load_engine(config, ctx.init_model_path)
        engine.has_weights = ctx.restarts == 0  # the run may have gone on from those of the checkpoint
        return engine, renderer

    worker = EngineWorker(load, ctx.beat)
    source = WeightSource.of(ctx)
    lease = Lease(config, source, worker.resume) if source.leased else None
    app = build_app(worker, config, doors_of(ctx.plan, ctx.keys), source, lease)
    assert ctx.listen_socket is not None
    runner = await start_serving(app, ctx.listen_socket, cancelling=True)
    announced = False
    try:
        while not ctx.stop_requested:
            if worker.error is not None:
                raise worker.error
            if worker.loaded and not announced:
                ctx.ready()
                announced = True
            if lease is not None:
                await lease.tick()
            await asyncio.sleep(0.05)
    finally:
        worker.stop()
        await runner.cleanup()


def load_engine(config: RunConfig, init_model_path: str | None) -> tuple[TorchEngine, ChatRenderer]:
    """Weights and tokenizer of the run on this process's device. Raises UserError."""
    path = resolve_model_path(config.model, Path(config.cache_dir), init_model_path)
    check_card(path, config.model.card)
    name = config.model.dtype if config.inference.dtype == "auto" else config.inference.dtype
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    renderer = ChatRenderer.later(functools.partial(load_tokenizer, config.model, path))
    if config.job == "inference":  # elsewhere nobody may ever ask for text: others of the run tokenise
        _ = renderer.backend
    device = pick_device(config.deployment.device)
    if (part := world_of(config).overlapping_part) is not None:
        limit_memory(device, part)
    model = load_model(path, config.model.card, dtype, device)
    eos = eos_token_ids(eos_of(config.model, path), path, config.model.card.vocab_size)
    return TorchEngine(model, config.inference, eos), renderer


def eos_token_ids(of_tokenizer: int | None, path: Path, vocab: int) -> tuple[int, ...]:
    """What ends a completion: the tokenizer's EOS, and what generation_config.json adds to it, as in vLLM."""
    file = path / "generation_config.json"
    added = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
    ids = [of_tokenizer, *(added if isinstance(added, list) else [added])]
    return tuple(dict.fromkeys(i for i in ids if i is not None and 0 <= i < vocab))  # a model has no others to draw


def build_app(
    worker: EngineWorker, config: RunConfig, doors: Doors, source: WeightSource, lease: Lease | None = None
) -> web.Application:
    """All routes; `source`: from where weights may come; `lease`: of a server that runs may take."""
    app = web.Application(middlewares=[_guard(doors, worker.settled, lease), _report_errors])
    add_generate_route(app, worker, config.model.name, with_socket=lease is None)  # a lease is asked for each request
    add_chat_routes(app, worker, config.model.name)
    add_control_routes(app, worker)
    add_weight_routes(app, worker, source, lease)
    add_metrics_route(app, worker, config.model.name)
    if lease is not None:
        add_lease_route(app, lease)
    return app


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_lease_route(app: web.Application, lease: Lease) -> None:
    async def answer(http: web.Request) -> web.Response:
        body = await read_object(http) if http.method == "POST" else None
        status, content = await lease.answer(http.method, http.headers.get(RUN_HEADER), body)
        return web.json_response(content, status=status)

    for method in ("GET", "POST", "DELETE"):
        app.router.add_route(method, LEASE, answer)


def _guard(doors: Doors, settled: asyncio.Event, lease: Lease | None) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        authorization, origin = request.headers.get("Authorization", ""), request.headers.get("Origin")
        if reason := refusal(doors, request.path, authorization, origin, request.host):
            return error_response(401, reason)
        if request.path not in OPEN_ROUTES:  # what comes while the model loads waits for it
            await settled.wait()
        if lease is not None and (held := lease.refusal(request.method, request.path, request.headers.get(RUN_HEADER))):
            return error_response(*held)
        if request.path in GENERATING_ROUTES:
            return await handler(request)
        response = await asyncio.shield(asyncio.ensure_future(handler(request)))
        if lease is not None:
            lease.told(request.path, response.status)
        return response

    return guard


@web.middleware
async def _report_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors as vLLM's JSON."""
    try:
        return await handler(request)
    except Exception as error:
        status, body = report(error, f"{request.method} {request.path}")
        return web.json_response(body, status=status)


def error_response(status: int, message: str, kind: str | None = None) -> web.Response:
    return web.json_response(error_body(status, message, kind), status=status)
