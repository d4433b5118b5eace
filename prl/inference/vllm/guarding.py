"""What stands before vLLM's application: keys, bounds of what is asked, patience with who sends slowly."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from prl.config.engines import logprobs_of_kept
from prl.config.schema import RunConfig
from prl.inference.bounds import CONTROL_BODY, MAX_N, OPEN_BODY, body_limit, check_bounds, parse_json
from prl.inference.errors import error_body
from prl.inference.guard import CLIENT_ROUTES, OPEN_ROUTES, Doors, refusal
from prl.inference.lease import Lease
from prl.inference.vllm.prefetching import FINISH, UPDATE, Prefetcher
from prl.runtime.external import LEASE, RUN_HEADER
from prl.transport.kinds import PREFETCH
from prl.transport.serving import BODY_S, HEAD_S
from prl.transport.sources import WeightSource

ADAPTERS = "/v1/load_lora_adapter"
BRING_WEIGHTS = (FINISH, ADAPTERS)
DRAINED = 8  # times as much as is allowed is read before the answer, so that who sends it gets to read that


class Refused(Exception):
    """An answer with this status in place of the application's."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    def response(self) -> JSONResponse:
        return JSONResponse(error_body(self.status, str(self)), status_code=self.status)


class Guard:
    """The application behind our keys and bounds. vLLM's own api_key leaves control routes open.

    After a restart (`has_weights` False) nothing is generated before the first update: 503; nor at the beginning where
    the engine starts with made-up weights.
    """

    def __init__(
        self,
        app: ASGIApp,
        doors: Doors,
        source: WeightSource,
        config: RunConfig,
        *,
        has_weights: bool,
        lease: Lease | None = None,
    ) -> None:
        self.app, self.doors, self.source, self.has_weights = app, doors, source, has_weights
        self.lease, self.prefetcher = lease, Prefetcher(source)
        if lease is not None:
            lease.at_end.append(self.prefetcher.forget)
        self.vocab = config.model.card.vocab_size
        self.logprobs = max(MAX_N, logprobs_of_kept(config))  # vLLM has a bound of its own, not to be undercut
        self.body_limit = body_limit(config.inference.max_model_len)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        try:
            self._check_key(scope)
            body = await read_all(receive, self._most(scope["path"]))
            self._check_body(scope["path"], body)
            if self.lease is not None and scope["path"] == LEASE:
                status, content = await self._answer_lease(self.lease, scope, body)
                return await JSONResponse(content, status_code=status)(scope, receive, send)
            self._check_lease(scope)
            if scope["path"] == PREFETCH:
                await self._prefetch(body)
                return await JSONResponse({"message": "Weights fetched"})(scope, receive, send)
            if scope["path"] == UPDATE:
                body = self.prefetcher.amend(body)
        except Refused as refused:
            return await refused.response()(scope, receive, send)

        async def answer(message: Message) -> None:
            if scope["path"] in BRING_WEIGHTS and message.get("status") == 200:
                self.has_weights = True
            if scope["path"] == FINISH and "status" in message:
                self.prefetcher.release()
            if self.lease is not None and "status" in message:
                self.lease.told(scope["path"], message["status"])
            await send(message)

        await self.app(scope, once(body, receive), answer)

    def _most(self, path: str) -> int:
        """Bytes of a body; who need show no key has none to send."""
        if path in OPEN_ROUTES:
            return OPEN_BODY
        return self.body_limit if path in CLIENT_ROUTES else CONTROL_BODY

    def _check_key(self, scope: Scope) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        authorization, origin, host = headers.get("authorization", ""), headers.get("origin"), headers.get("host", "")
        if reason := refusal(self.doors, scope["path"], authorization, origin, host):
            raise Refused(401, reason)
        samples = scope["method"] == "POST" and scope["path"].startswith(("/v1/", "/inference/"))
        if samples and not self.has_weights and scope["path"] != ADAPTERS:
            raise Refused(503, "no weights since a restart, or none yet from a trainer that sends blocks of FP8")

    async def _answer_lease(self, lease: Lease, scope: Scope, body: bytes) -> tuple[int, Any]:
        try:
            return await lease.answer(scope["method"], _header(scope, RUN_HEADER), parse_json(body) if body else None)
        except ValueError as error:
            raise Refused(400, str(error)) from error

    async def _prefetch(self, body: bytes) -> None:
        try:
            await self.prefetcher.fetch(parse_json(body))
        except ValueError as error:
            raise Refused(400, str(error)) from error

    def _check_lease(self, scope: Scope) -> None:
        if self.lease is not None and (
            held := self.lease.refusal(scope["method"], scope["path"], _header(scope, RUN_HEADER))
        ):
            raise Refused(*held)

    def _check_body(self, path: str, body: bytes) -> None:
        if not body:
            return
        try:
            if path in CLIENT_ROUTES:
                check_bounds(parse_json(body), self.vocab, self.logprobs)
            elif path == ADAPTERS:
                adapter = str(dict(parse_json(body)).get("lora_path"))
                self.source.check_path(adapter, adapter.rpartition("/")[2])
        except (ValueError, TypeError) as error:
            raise Refused(400, str(error)) from error


def _header(scope: Scope, name: str) -> str | None:
    wanted = name.lower().encode()
    return next((value.decode("latin-1") for key, value in scope["headers"] if key.lower() == wanted), None)


async def read_all(receive: Receive, most: int) -> bytes:
    """A request's body. Raises Refused when it is too long or too slow, or its client went away."""
    data, size = bytearray(), 0
    try:
        async with asyncio.timeout(BODY_S):
            more = True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Refused(400, "the client went away")
                piece = message.get("body", b"")
                size += len(piece)
                if size <= most:
                    data += piece
                more = message.get("more_body", False) and size <= DRAINED * most
    except TimeoutError as error:
        raise Refused(408, f"the body did not come within {BODY_S:g} s") from error
    if size > most:
        raise Refused(413, f"the body has more than {most} bytes")
    return bytes(data)


def once(body: bytes, receive: Receive) -> Receive:
    """`receive` of an application whose body has been read: that body, then whatever comes."""
    given = False

    async def again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again


class TimedProtocol(HttpToolsProtocol):
    """A connection on which no whole head comes in time is closed: uvicorn would wait for ever, for the first one, for
    the rest of one, and for a next one of which nothing but an empty line has come.
    """

    def connection_made(self, transport: Any) -> None:
        self.head_timer: asyncio.TimerHandle | None = None
        super().connection_made(transport)
        self._expect_head()

    def _expect_head(self) -> None:
        self._head_came()
        self.head_timer = self.loop.call_later(HEAD_S, self.transport.abort)

    def _head_came(self) -> None:
        if self.head_timer is not None:
            self.head_timer.cancel()

    def on_message_begin(self) -> None:
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_came()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        another_waits = bool(self.pipeline)  # its head is there; the answer to it comes next
        super().on_response_complete()
        if not another_waits and not self.transport.is_closing():
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)
