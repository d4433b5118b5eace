"""The orchestrator's HTTP routes for the trainer: batches out, news of weights and checkpoints in.

All of them answer within LONG_POLL_S, and may be called twice, for a client repeats a call whose answer it did not get:
what is told by POST counts once for its publication or step, and what takes long is begun by POST and asked for by GET.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from aiohttp import web

from prl.runtime.process.keys import bears
from prl.transport.frames import Message
from prl.transport.serving import InPieces, read_body, start_serving

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

LONG_POLL_S = 5.0
MAX_BODY = 64 << 20  # bytes; of a large model's layout
MOST = 1 << 53


class BadRequest(ValueError):
    """What no trainer asks: the run goes on as if it had not been asked."""


class TrainerService(Protocol):
    """What the routes call."""

    async def batch_for(self, step: int, data_rank: int, publications: int, timeout_s: float) -> Message | None: ...
    async def weights_published(self, publication: int, version: int, update_info: dict[str, object]) -> None: ...
    async def turn_reached(self, publication: int, timeout_s: float) -> bool: ...
    async def weights_delivered(self, publication: int, timeout_s: float) -> bool | None: ...
    async def trainer_checkpointed(self, step: int, in_haste: bool) -> None: ...
    async def checkpoint_committed(self, step: int, timeout_s: float) -> float | None: ...
    async def trainer_done(self, step: int) -> None: ...
    def fail(self, error: Exception) -> None: ...


def number(fields: Mapping[str, Any], name: str) -> int:
    """A count from a query or a body. Raises BadRequest."""
    value = fields.get(name)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 16:
        value = int(value)
    if type(value) is not int or not 0 <= value < MOST:
        raise BadRequest(f"{name} must be a count, not {str(value)[:50]!r}")
    return value


async def read_fields(request: web.Request) -> dict[str, Any]:
    """The body. Raises BadRequest."""
    try:
        body = json.loads(await read_body(request, MAX_BODY))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


async def start_server(service: TrainerService, listen_socket: socket.socket, key: str) -> web.AppRunner:
    """Serve on an already bound socket."""
    return await start_serving(make_app(service, key), listen_socket)


def make_app(service: TrainerService, key: str) -> web.Application:
    """All routes; every call needs the trainers' key."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not bears(request.headers.get("Authorization", ""), [key.encode()]):
            return web.json_response({"error": "wrong or missing key"}, status=401)
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.json_response({"error": f"{error.reason}: {request.method} {request.path}"}, status=error.status)
        except BadRequest as error:
            return web.json_response({"error": str(error)}, status=400)
        except Exception as error:  # ends the run with the cause, not with the trainer's "500"
            service.fail(error)
            return web.json_response({"error": f"{type(error).__name__}: {error}"}, status=500)

    async def batch(request: web.Request) -> web.Response:
        step, data_rank, publications = (number(request.query, key) for key in ("step", "data_rank", "publications"))
        message = await service.batch_for(step, data_rank, publications, LONG_POLL_S)
        return web.Response(status=204) if message is None else web.Response(body=InPieces(message))

    async def weights(request: web.Request) -> web.Response:
        body = await read_fields(request)
        if not isinstance(body.get("update_info"), dict):
            raise BadRequest("update_info must be an object")
        await service.weights_published(number(body, "publication"), number(body, "version"), body["update_info"])
        return web.json_response({})

    async def turn(request: web.Request) -> web.Response:
        has_come = await service.turn_reached(number(request.query, "publication"), LONG_POLL_S)
        return web.json_response({}) if has_come else web.Response(status=204)

    async def delivery(request: web.Request) -> web.Response:
        taken = await service.weights_delivered(number(request.query, "publication"), LONG_POLL_S)
        return web.Response(status=204) if taken is None else web.json_response({"taken": taken})

    async def checkpoint(request: web.Request) -> web.Response:
        fields = await read_fields(request)
        await service.trainer_checkpointed(number(fields, "step"), fields.get("in_haste") is True)
        return web.json_response({})

    async def committed(request: web.Request) -> web.Response:
        took_s = await service.checkpoint_committed(number(request.query, "step"), LONG_POLL_S)
        return web.Response(status=204) if took_s is None else web.json_response({"took_s": took_s})

    async def done(request: web.Request) -> web.Response:
        await service.trainer_done(number(await read_fields(request), "step"))
        return web.json_response({})

    app = web.Application(middlewares=[authorize])
    app.router.add_get("/train/batch", batch)
    app.router.add_post("/train/weights", weights)
    app.router.add_get("/train/turn", turn)
    app.router.add_get("/train/delivery", delivery)
    app.router.add_post("/train/checkpoint", checkpoint)
    app.router.add_get("/train/checkpoint", committed)
    app.router.add_post("/train/done", done)
    return app
