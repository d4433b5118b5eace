"""The built-in router: a reverse proxy over the generating routes, on aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
from aiohttp import web

from prl.config.engines import EngineKind
from prl.config.schema import RouterConfig
from prl.inference.bounds import CONTROL_BODY, parse_json
from prl.inference.errors import ENGINE_DIED, error_body
from prl.inference.guard import GENERATING_ROUTES, OPEN_ROUTES, Doors, refusal
from prl.inference.router.metrics import prometheus_text
from prl.inference.router.policy import Policy
from prl.inference.router.prefill import decode_body, prefill_body
from prl.inference.router.prefixes import prompt_keys
from prl.inference.router.replicas import HealthChecks, Replica
from prl.transport.serving import read_body

MODELS_ROUTE = "/v1/models"
# one engine would obey and the others not
CONTROL_ROUTES = (
    *("/pause", "/resume", "/abort_requests", "/is_paused", "/sleep", "/wake_up", "/is_sleeping"),
    *("/reset_prefix_cache", "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"),
    *("/finish_weight_update", "/weight_info", "/load", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)
HOP_BY_HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
    *("transfer-encoding", "upgrade", "content-length", "host", "authorization", "expect"),
}
MAX_DEATHS = 2  # of replicas that had a request: then it may be the request, and no other replica gets it
IDLE_CONNECTION_S = 2.0  # uvicorn, under vLLM, closes idle connections after 5 s


class Unanswered(Exception):
    """The replica did not take the request, or failed before the first byte of its answer: another one may be asked."""


class Died(Unanswered):
    """The replica went away with the request in its hands, perhaps because of it."""


class Router:
    """One URL for all replicas.

    Args:
        replicas: name -> URL.
        kinds: of each replica; None: all prefill and decode by themselves.
        key: that the engines want.
        doors: of its clients; it has no control routes.
        body_limit: bytes of a request.
    """

    def __init__(
        self,
        config: RouterConfig,
        replicas: dict[str, str],
        key: str,
        doors: Doors,
        kinds: Sequence[EngineKind] | None = None,
        body_limit: int = CONTROL_BODY,
    ) -> None:
        self.policy = Policy(config)
        kinds = kinds or ["both"] * len(replicas)
        self.replicas = [Replica(name, url, kind) for (name, url), kind in zip(replicas.items(), kinds, strict=True)]
        self.prefills = "prefill" in kinds
        self.key, self.doors = key, doors
        self.body_limit, self.retries = body_limit, 0

    @property
    def is_healthy(self) -> bool:
        """Whether some replica of each kind is."""
        kinds = {replica.kind for replica in self.replicas}
        return kinds == {replica.kind for replica in self.replicas if replica.healthy}

    def app(self) -> web.Application:
        app = web.Application(middlewares=[self._guard])
        app.router.add_routes([web.post(route, self._generate) for route in GENERATING_ROUTES])
        app.router.add_get(MODELS_ROUTE, self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/workers", self._workers)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, app: web.Application) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION_S)
        timeout = aiohttp.ClientTimeout(total=None)  # the client's patience counts
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as self.session:
            self.checks = HealthChecks(self.session, self.replicas, self.policy.forget)
            checking = asyncio.create_task(self.checks.run())
            yield
            checking.cancel()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        authorization, origin = request.headers.get("Authorization", ""), request.headers.get("Origin")
        route = (
            request.path if request.path in OPEN_ROUTES else MODELS_ROUTE
        )  # there is none here that changes anything
        if reason := refusal(self.doors, route, authorization, origin, request.host):
            return error_response(401, reason)
        return await handler(request)

    # --- what is passed on --------------------------------------------------------------------------------------------

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        try:
            data = await read_body(request, self.body_limit)
        except web.HTTPException as error:
            return error_response(error.status, error.text or error.reason)
        try:
            body = parse_json(data) if data else None
        except ValueError as error:
            return error_response(400, str(error))
        keys = prompt_keys(body) if isinstance(body, dict) else []
        if not self.prefills or not isinstance(body, dict):  # an engine will say what is wrong
            return await self._forward(request, data, keys)
        answer = await self._forward(request, json.dumps(prefill_body(body)).encode(), keys, "prefill")
        if answer.status != 200:
            return answer
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        found = json.loads(answer.body).get("kv_transfer_params")
        if not found:
            return error_response(500, "a prefill engine returned no place of its KV")
        return await self._forward(request, json.dumps(decode_body(body, found)).encode(), keys)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return await self._forward(request, b"", [])

    async def _forward(
        self, request: web.Request, data: bytes, keys: list[int], kind: EngineKind = "decode"
    ) -> web.StreamResponse:
        """Ask one replica after another until one answers, each at most once; `decode`: or one that does both."""
        tried: set[int] = set()
        why, deaths = "no replica is healthy", 0
        able = {i: r for i, r in enumerate(self.replicas) if (r.kind == "prefill") == (kind == "prefill")}
        while loads := {i: r.in_flight for i, r in able.items() if r.healthy and i not in tried}:
            index = self.policy.choose(keys, loads)
            self.retries += bool(tried)
            tried.add(index)
            replica = self.replicas[index]
            replica.in_flight += 1
            replica.requests += 1
            try:
                return await self._exchange(request, data, replica)
            except Unanswered as failure:
                replica.failures += 1
                why = f"{replica.name}: {failure}"
                self.checks.fail(index, str(failure))
                deaths += isinstance(failure, Died)
                if deaths == MAX_DEATHS:
                    why += f"; {deaths} replicas died with this request, so no other gets it"
                    break
            finally:
                replica.in_flight -= 1
        return error_response(503, why)

    async def _exchange(self, request: web.Request, data: bytes, replica: Replica) -> web.StreamResponse:
        """One question, one answer. Raises Unanswered."""
        answer = await self._ask(request, data, replica)
        async with answer:
            if answer.status == 503:
                text = (await answer.text(errors="replace"))[:300]
                raise (Died if ENGINE_DIED in text else Unanswered)(f"503: {text}")
            headers = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_BY_HOP}
            if answer.content_type != "text/event-stream":
                try:
                    content = await answer.read()
                except aiohttp.ClientError as error:
                    raise Died(f"{type(error).__name__}: {error}") from error
                return web.Response(status=answer.status, headers=headers, body=content)
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            # an answer that breaks off cannot be taken back: the client's connection breaks off, too
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _ask(self, request: web.Request, data: bytes, replica: Replica) -> aiohttp.ClientResponse:
        """The head of the answer. A client that hangs up ends the call, and with it what the engine does for it."""
        kept = ((name, value) for name, value in request.headers.items() if name.lower() not in HOP_BY_HOP)
        headers = {name: value for name, value in kept if value.isascii()}  # others cannot be written as they came
        headers["Authorization"] = f"Bearer {self.key}"
        for name in ("Origin", "Cookie"):  # of no concern to engines, who would take an Origin for a web page
            headers.pop(name, None)
        call = asyncio.ensure_future(
            self.session.request(request.method, replica.url + request.path_qs, data=data or None, headers=headers)
        )
        replica.waiting.add(call)
        try:
            await asyncio.wait([call])
            if call.cancelled():
                raise Died("it is being restarted")
            return call.result()
        except aiohttp.ClientConnectorError as error:
            raise Unanswered(f"{type(error).__name__}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Died(f"{type(error).__name__}: {error}") from error
        finally:
            call.cancel()
            replica.waiting.discard(call)

    # --- its own routes -----------------------------------------------------------------------------------------------

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        text = prometheus_text(self.replicas, self.policy, self.retries)
        return web.Response(body=text.encode(), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _workers(self, request: web.Request) -> web.Response:
        """As vllm-router has it: where the engines are, say for those who scrape their metrics."""
        workers = [{"url": r.url, "is_healthy": r.healthy, "load": r.in_flight} for r in self.replicas]
        return web.json_response({"workers": workers, "total": len(workers)})

    async def _refuse(self, request: web.Request) -> web.Response:
        if request.path in CONTROL_ROUTES:
            return error_response(403, f"{request.path} is for all engines or one: ask those of GET /workers")
        return error_response(404, f"the router has no {request.method} {request.path}")


def error_response(status: int, message: str) -> web.Response:
    return web.json_response(error_body(status, message), status=status)
