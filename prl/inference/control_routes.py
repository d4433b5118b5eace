"""Control over the engine: pause and resume, abort, sleep, caches, health."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import get_args

from aiohttp import web

from prl.inference.requests import read_object
from prl.inference.worker import EngineWorker, PauseMode

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
TAGS = ("weights", "kv_cache")


def add_control_routes(app: web.Application, worker: EngineWorker) -> None:
    async def is_paused(http: web.Request) -> web.Response:
        return web.json_response({"is_paused": worker.paused})

    async def is_sleeping(http: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": not worker.engine.awake})

    async def health(http: web.Request) -> web.Response:
        return web.Response(status=200 if worker.loaded else 503)

    async def reset_prefix_cache(http: web.Request) -> web.Response:
        await worker.run(worker.engine.reset_prefix_cache)
        return web.Response(status=200)

    app.router.add_get("/health", health)
    app.router.add_get("/is_paused", is_paused)
    app.router.add_get("/is_sleeping", is_sleeping)
    app.router.add_post("/reset_prefix_cache", reset_prefix_cache)
    app.router.add_routes([web.post(path, handler) for path, handler in _pause_routes(worker).items()])
    app.router.add_routes([web.post(path, handler) for path, handler in _sleep_routes(worker).items()])


def _pause_routes(worker: EngineWorker) -> dict[str, Handler]:
    async def pause(http: web.Request) -> web.Response:
        clear = http.query.get("clear_cache", "true").lower()
        if clear not in ("true", "false"):
            raise ValueError(f"clear_cache must be true or false, not {clear!r}")
        await worker.pause(_mode(http, "abort"), clear_cache=clear == "true")
        return web.json_response({"status": "paused"})

    async def resume(http: web.Request) -> web.Response:
        await worker.resume()
        return web.json_response({"status": "resumed"})

    async def abort_requests(http: web.Request) -> web.Response:
        request_ids = (await read_object(http)).get("request_ids")
        if request_ids is not None and not isinstance(request_ids, list):
            raise ValueError("request_ids must be a list of strings")
        return web.json_response({"status": "aborted", "aborted": await worker.abort(request_ids or None)})

    return {"/pause": pause, "/resume": resume, "/abort_requests": abort_requests}


def _sleep_routes(worker: EngineWorker) -> dict[str, Handler]:
    async def sleep(http: web.Request) -> web.Response:
        level = http.query.get("level", "1")
        if level not in ("1", "2"):
            raise ValueError(f"level must be 1 or 2, not {level!r}")
        mode = _mode(http, "keep")
        if mode == "abort":
            await worker.abort(None)
        elif mode == "wait":
            was_paused = worker.paused
            await worker.pause("wait")
            if not was_paused:
                await worker.resume()
        await worker.run(lambda: worker.engine.sleep(int(level)))
        return web.json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(http: web.Request) -> web.Response:
        tags = http.query.getall("tags", list(TAGS))
        if not set(tags) <= set(TAGS):
            raise ValueError(f"tags must be among {', '.join(TAGS)}, not {', '.join(tags)}")
        await worker.run(lambda: worker.engine.wake_up(tags))
        return web.json_response({"status": "awake" if worker.engine.awake else "sleeping", "tags": tags})

    return {"/sleep": sleep, "/wake_up": wake_up}


def _mode(http: web.Request, default: PauseMode) -> PauseMode:
    for mode in get_args(PauseMode):
        if http.query.get("mode", default) == mode:
            return mode
    raise ValueError(f"mode must be {', '.join(get_args(PauseMode))}, not {http.query['mode']!r}")
