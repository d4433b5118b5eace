"""What all HTTP servers of a run have in common: patience with who sends slowly, and an end to it."""

from __future__ import annotations

import asyncio
import logging
import socket

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.payload import Payload

from prl.transport.frames import Message

HEAD_S = 15.0  # from connecting, or from the last answer, until a whole head must have come
BODY_S = 60.0  # for the rest of a request
LINGER_S = 1.0  # for what is left of a request that was answered before all of it had come

log = logging.getLogger("prl.http")


def is_our_fault(record: logging.LogRecord) -> bool:
    """Not a head that is no HTTP: aiohttp would write a traceback for each, which fills disks at a stranger's will."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log.addFilter(is_our_fault)


async def start_serving(
    app: web.Application, listen_socket: socket.socket, *, cancelling: bool = False
) -> web.AppRunner:
    """Serve on a socket that listens already. `cancelling`: a client that hangs up ends what is done for it."""
    runner = web.AppRunner(
        app,
        access_log=None,
        shutdown_timeout=0.5,
        handler_cancellation=cancelling,
        keepalive_timeout=HEAD_S,  # aiohttp counts it from connecting, too
        lingering_time=LINGER_S,
        logger=log,
    )
    await runner.setup()
    await web.SockSite(runner, listen_socket).start()
    return runner


class InPieces(Payload):
    """A large body, sent piece by piece and by no copy of the whole, so that the event loop serves others between."""

    def __init__(self, message: Message) -> None:
        super().__init__(Message([*message.parts]), content_type="application/octet-stream")
        self._size = len(message)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        raise TypeError("binary")

    async def write(self, writer: AbstractStreamWriter) -> None:
        for piece in self._value.pieces():
            await writer.write(piece)
            await asyncio.sleep(0)  # a socket that takes all at once would not let others in


async def read_body(request: web.Request, most: int) -> bytes:
    """At most `most` bytes. Raises HTTPRequestEntityTooLarge (413), HTTPRequestTimeout (408),
    HTTPBadRequest for a body that is not encoded as it says."""
    data = bytearray()
    if (request.content_length or 0) > most:
        raise web.HTTPRequestEntityTooLarge(most, request.content_length or 0)
    try:
        async with asyncio.timeout(BODY_S):
            async for chunk in request.content.iter_any():  # decompressed, if it came so
                data += chunk
                if len(data) > most:
                    raise web.HTTPRequestEntityTooLarge(most, len(data))
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise web.HTTPBadRequest(text=f"the body cannot be read: {error}") from error
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(text=f"the body did not come within {BODY_S:g} s") from error
    return bytes(data)
