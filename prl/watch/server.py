"""The page's routes: a token in the link becomes a cookie; without it nothing is told. Everything is read-only."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from prl.transport.serving import start_serving
from prl.watch.rollout_index import FILTERS, SORTS
from prl.watch.store import Store
from prl.watch.timeline import timeline

ASSETS = Path(__file__).parent / "assets"
KINDS = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
MOST_ROWS = 200  # of a page of rollouts
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Query = Mapping[str, str]


def make_token() -> str:
    return secrets.token_urlsafe(24)


def make_app(store: Store, token: str) -> web.Application:
    """Routes of the page, its assets and its data."""
    cookie = f"prl_watch_{secrets.token_hex(4)}"  # cookies know no ports: another page here has another name

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.query.get("token")
        if given is not None and request.path == "/" and _same(given, token):
            answer: web.StreamResponse = web.Response(status=303, headers={"Location": "/"})
            answer.set_cookie(cookie, token, httponly=True, samesite="Strict", path="/")
        elif not _same(request.cookies.get(cookie, ""), token):
            text = "This page wants the token of the link that `python -m prl.watch` has printed."
            answer = web.Response(status=401, text=f"{text}\n")
            if request.path.startswith("/api/"):
                answer = web.json_response({"error": text}, status=401)
        else:
            try:
                answer = await handler(request)
            except web.HTTPException as error:
                answer = web.Response(status=error.status, text=error.reason)
                if request.path.startswith("/api/"):
                    why = _no_route(request) if error.status == 404 else error.reason
                    answer = web.json_response({"error": why}, status=error.status)
        answer.headers.update(HEADERS)
        return answer

    async def asset(request: web.Request) -> web.StreamResponse:
        path = ASSETS / (request.match_info.get("name") or "index.html")
        if path.name not in {known.name for known in ASSETS.iterdir()} or path.suffix not in KINDS:
            raise web.HTTPNotFound
        return web.Response(body=path.read_bytes(), content_type=KINDS[path.suffix], charset="utf-8")

    async def data(request: web.Request) -> web.StreamResponse:
        view = VIEWS.get(request.match_info["view"])
        if view is None:
            raise web.HTTPNotFound
        try:
            found = await asyncio.to_thread(lambda: to_json(view(store, request.query)))
        except LookupError as error:
            return web.json_response({"error": str(error.args[0])}, status=404)
        except ValueError as error:
            return web.json_response({"error": str(error)}, status=400)
        return web.Response(text=found, content_type="application/json")

    app = web.Application(middlewares=[guard])
    app.router.add_get("/", asset)
    app.router.add_get("/assets/{name}", asset)
    app.router.add_get("/api/{view}", data)
    return app


def _no_route(request: web.Request) -> str:
    """Of a view that there is not."""
    return f"there is no {request.path[:200]}; there are {', '.join(f'/api/{name}' for name in VIEWS)}"


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(errors="surrogateescape"), token.encode())


async def serve(store: Store, token: str, listen_socket: socket.socket) -> web.AppRunner:
    """Serve on a socket that listens, and read in the background what is on disk already."""
    app = make_app(store, token)

    async def warm(app: web.Application) -> AsyncIterator[None]:
        warming = asyncio.create_task(asyncio.to_thread(store.warm))
        yield
        warming.cancel()

    app.cleanup_ctx.append(warm)
    return await start_serving(app, listen_socket)


def to_json(found: Any) -> str:
    """What browsers read: numbers that are not finite, which JSON has no words for, become null."""
    try:
        return json.dumps(found, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(found))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- data -------------------------------------------------------------------------------------------------------------


def _number(query: Query, key: str, otherwise: int) -> int:
    """A count. Raises ValueError."""
    text = query.get(key, "")
    if not text:
        return otherwise
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise ValueError(f"{key} must be a count, not {text[:50]!r}")
    return int(text)


def overview(store: Store, query: Query) -> Any:
    return store.overview()


def sweep(store: Store, query: Query) -> Any:
    return store.sweep_charts(query.get("sweep", "."))


def run(store: Store, query: Query) -> Any:
    found = store.run(query.get("run", ""))
    state = store.state_of(found)
    with found.lock:
        found.series.poll()
        return {"state": state, "charts": found.series.charts()}


def steps(store: Store, query: Query) -> Any:
    """The timeline of a step; without one, of the newest. Raises LookupError for one that is not there."""
    found, step = store.run(query.get("run", "")), _number(query, "step", -1) if query.get("step") else None
    with found.lock:
        found.series.poll()
        return timeline(found.series.timed, step)


def rollouts(store: Store, query: Query) -> Any:
    """A page of rollouts. Raises ValueError for what it cannot be sorted by."""
    sort, order = query.get("sort", "step"), query.get("order", "falling")
    if sort not in SORTS or order not in ("falling", "rising"):
        raise ValueError(f"sort must be one of {', '.join(SORTS)}, and order falling or rising")
    wanted = {key: query[key] for key in FILTERS if query.get(key)}
    found = store.run(query.get("run", ""))
    count = min(_number(query, "count", 50), MOST_ROWS)
    with found.lock:
        found.rollouts.poll()
        return found.rollouts.page(sort, order == "falling", wanted, _number(query, "first", 0), count)


def rollout(store: Store, query: Query) -> Any:
    found = store.run(query.get("run", ""))
    with found.lock:
        found.rollouts.poll()
        return found.rollouts.whole(query.get("id", ""))


def tasks(store: Store, query: Query) -> Any:
    return {"tasks": store.common_tasks(query.get("one", ""), query.get("other", ""))}


VIEWS: dict[str, Callable[[Store, Query], Any]] = {
    "overview": overview,
    "sweep": sweep,
    "run": run,
    "steps": steps,
    "rollouts": rollouts,
    "rollout": rollout,
    "tasks": tasks,
}
