"""What went wrong with a request, as the status and the JSON of its answer."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import web

from prl.inference.errors import ENGINE_DIED, error_body
from prl.inference.requests import ModelNotFound
from prl.inference.worker import EngineDied, EngineUnavailable, SequenceFailed

log = logging.getLogger("prl.inference")


def report(error: Exception, asked: str) -> tuple[int, dict[str, Any]]:
    """`asked`: the route, for the log and for errors of HTTP's own."""
    if isinstance(error, web.HTTPException):
        return told(error.status, f"{error.reason}: {asked}")
    if isinstance(error, ModelNotFound):
        return told(404, str(error))
    if isinstance(error, ValueError):
        return told(400, str(error))
    if isinstance(error, EngineDied):
        return told(503, str(error), ENGINE_DIED)
    if isinstance(error, EngineUnavailable):
        return told(503, str(error))
    if isinstance(error, SequenceFailed):
        return told(500, str(error))
    log.error("%s", asked, exc_info=error)
    return told(500, f"{type(error).__name__}: {error}")


def told(status: int, message: str, kind: str | None = None) -> tuple[int, dict[str, Any]]:
    return status, error_body(status, message, kind)
