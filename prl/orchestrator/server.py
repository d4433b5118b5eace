"""The orchestrator's HTTP routes for the trainer: batches out, news of weights and checkpoints in."""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LONG_POLL_S = 5.0


class TrainerService(Protocol):
    """What the routes call."""

    async def batch_for(self, step: int, data_rank: int, publications: int, timeout_s: float) -> bytes | None: ...
    async def weights_published(self, publication: int, version: int, update_info: dict[str, object]) -> None: ...
    async def turn_reached(self, publication: int, timeout_s: float) -> bool: ...
    async def weights_delivered(self, publication: int, timeout_s: float) -> bool | None: ...
    async def trainer_checkpointed(self, step: int) -> None: ...
    async def trainer_done(self, step: int) -> None: ...
    def fail(self, error: Exception) -> None: ...


async def start_server(service: TrainerService, listen_socket: socket.socket, token: str) -> web.AppRunner:
    """Serve on an already bound socket; every call needs the run's token."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {token}":
            return web.json_response({"error": "wrong or missing token"}, status=401)
        try:
            return await handler(request)
        except Exception as error:  # ends the run with the cause, not with the trainer's "500"
            service.fail(error)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def batch(request: web.Request) -> web.Response:
        step, data_rank, publications = (int(request.query[key]) for key in ("step", "data_rank", "publications"))
        body = await service.batch_for(step, data_rank, publications, LONG_POLL_S)
        return web.Response(status=204) if body is None else web.Response(body=body)

    async def weights(request: web.Request) -> web.Response:
        body = await request.json()
        await service.weights_published(body["publication"], body["version"], body["update_info"])
        return web.json_response({})

    async def turn(request: web.Request) -> web.Response:
        has_come = await service.turn_reached(int(request.query["publication"]), LONG_POLL_S)
        return web.json_response({}) if has_come else web.Response(status=204)

    async def delivery(request: web.Request) -> web.Response:
        taken = await service.weights_delivered(int(request.query["publication"]), LONG_POLL_S)
        return web.Response(status=204) if taken is None else web.json_response({"taken": taken})

    async def checkpoint(request: web.Request) -> web.Response:
        await service.trainer_checkpointed((await request.json())["step"])
        return web.json_response({})

    async def done(request: web.Request) -> web.Response:
        await service.trainer_done((await request.json())["step"])
        return web.json_response({})

    app = web.Application(middlewares=[authorize])
    app.router.add_get("/train/batch", batch)
    app.router.add_post("/train/weights", weights)
    app.router.add_get("/train/turn", turn)
    app.router.add_get("/train/delivery", delivery)
    app.router.add_post("/train/checkpoint", checkpoint)
    app.router.add_post("/train/done", done)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    await web.SockSite(runner, listen_socket).start()
    return runner
