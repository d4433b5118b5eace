"""One answer of an HTTP server of a run that comes too late, or never.

HTTP_ROUTE: its path; HTTP_COUNT: which of the requests to it in one process; HTTP_FAULT: "delay" (the answer comes when
the asker has given up) or "drop" (the request is carried out, and the connection closed instead of an answer). Once in
a run: FAULT_DIR. Time limits of the trainer's client are shortened, so that "too late" is soon.
"""

import asyncio
import os
from pathlib import Path

ROUTE, COUNT, FAULT = os.environ["HTTP_ROUTE"], int(os.environ["HTTP_COUNT"]), os.environ["HTTP_FAULT"]
DONE = Path(os.environ["FAULT_DIR"]) / "reached"
CLIENT_S, SERVER_S = 3.0, 1.0
came = [0]


def is_now(path):
    if path != ROUTE:
        return False
    came[0] += 1
    if came[0] != COUNT:
        return False
    try:
        DONE.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def patch_web(module):
    create = module.Application.__init__

    @module.middleware
    async def fail(request, handler):
        if not is_now(request.path):
            return await handler(request)
        answer = await handler(request)
        if FAULT == "delay":
            await asyncio.sleep(CLIENT_S * 1.5)
        elif request.transport is not None:
            request.transport.abort()
        return answer

    def create_with_fault(self, *args, middlewares=(), **kwargs):
        create(self, *args, middlewares=[fail, *middlewares], **kwargs)

    module.Application.__init__ = create_with_fault


def shorten(name, seconds):
    return lambda module: setattr(module, name, seconds)


PATCHES = {
    "aiohttp.web": patch_web,
    "prl.trainer.loops.batches": shorten("LONG_POLL_S", CLIENT_S),
    "prl.orchestrator.server": shorten("LONG_POLL_S", SERVER_S),
}
