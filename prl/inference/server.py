"""The built-in engine behind vLLM's HTTP routes (vLLM 0.32), on aiohttp."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import torch
from aiohttp import web

from prl.inference.chat_route import add_chat_routes
from prl.inference.control_routes import add_control_routes
from prl.inference.engine import TorchEngine
from prl.inference.generate_route import add_generate_route
from prl.inference.worker import EngineDead, EngineWorker
from prl.models.chat import ChatRenderer
from prl.models.checkpoint import check_card, load_model, resolve_model_path
from prl.models.tokenizer import load_tokenizer
from prl.runtime.child import ChildContext

OPEN_ROUTES = ("/health",)


def main(ctx: ChildContext) -> None:
    """Entry of `inference/<i>` with inference.engine=torch."""
    asyncio.run(serve(ctx))


async def serve(ctx: ChildContext) -> None:
    """Load the model, serve until asked to stop."""
    config = ctx.plan.config
    path = resolve_model_path(config.model, Path(config.cache_dir), ctx.init_model_path)
    check_card(path, config.model.card)
    device = pick_device(config.deployment.device)
    name = config.model.dtype if config.inference.dtype == "auto" else config.inference.dtype
    dtype = torch.bfloat16 if name == "bfloat16" else torch.float32
    tokenizer = load_tokenizer(config.model, path)
    model = load_model(path, config.model.card, dtype, device)
    eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    worker = EngineWorker(TorchEngine(model, config.inference, eos), ctx.beat)
    keys = {ctx.token} | ({os.environ[config.inference.api_key_var]} if config.inference.api_key_var else set())
    app = build_app(worker, ChatRenderer(tokenizer), config.model.name, keys)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    assert ctx.listen_socket is not None
    await web.SockSite(runner, ctx.listen_socket).start()
    ctx.ready()
    try:
        while not ctx.stop_requested:
            if worker.error is not None:
                raise EngineDead(f"the engine died: {worker.error}") from worker.error
            await asyncio.sleep(0.05)
    finally:
        worker.stop()
        await runner.cleanup()


def pick_device(kind: str) -> torch.device:
    """deployment.device -> device; "auto" takes the GPU that this process sees, if any."""
    return torch.device("cuda" if kind == "cuda" or (kind == "auto" and torch.cuda.is_available()) else "cpu")


def build_app(worker: EngineWorker, renderer: ChatRenderer, model_name: str, keys: set[str]) -> web.Application:
    """All routes. Every route but /health wants `Authorization: Bearer <one of keys>`."""

    @web.middleware
    async def guard(request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> web.StreamResponse:
        if request.path not in OPEN_ROUTES and request.headers.get("Authorization", "").removeprefix("Bearer ") not in keys:
            return error_response(401, "wrong or missing API key")
        try:
            return await handler(request)
        except web.HTTPException:
            raise
        except (ValueError, KeyError, TypeError) as error:
            return error_response(400, f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error))
        except EngineDead as error:
            return error_response(500, str(error))

    app = web.Application(middlewares=[guard], client_max_size=1 << 30)
    add_generate_route(app, worker, model_name)
    add_chat_routes(app, worker, renderer, model_name)
    add_control_routes(app, worker)
    return app


def error_response(status: int, message: str) -> web.Response:
    kinds = {400: "BadRequestError", 401: "AuthenticationError", 500: "InternalServerError"}
    body: dict[str, Any] = {"error": {"message": message, "type": kinds[status], "code": status}}
    return web.json_response(body, status=status)
