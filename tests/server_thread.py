"""A server of aiohttp in a thread of the test's process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from prl.transport.serving import start_serving

Start = Callable[[socket.socket], Awaitable[Any]]


@contextmanager
def in_thread(server: web.Application | Start) -> Iterator[int]:
    """The port where an application is served, or what `server` starts on a socket."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port, loop, up = listener.getsockname()[1], asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def serve() -> None:
        is_app = isinstance(server, web.Application)
        runner = await (start_serving(server, listener, cancelling=True) if is_app else server(listener))
        up.set()
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert up.wait(120)
    try:
        yield port
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        assert not thread.is_alive()
        loop.close()
