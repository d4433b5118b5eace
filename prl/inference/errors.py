"""What engines, the router and guards answer in place of what was asked for: vLLM's form, that of OpenAI's clients."""

from __future__ import annotations

from typing import Any

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    408: "RequestTimeoutError",
    413: "RequestTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
ENGINE_DIED = "EngineDeadError"  # type of the error that whoever had a request in a dying engine gets, with 503


def error_body(status: int, message: str, kind: str | None = None) -> dict[str, Any]:
    """The JSON of an answer with this status; `kind` in place of the status's usual type."""
    return {"error": {"message": message, "type": kind or TYPES.get(status, TYPES[400]), "code": status}}
