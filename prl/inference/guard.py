"""Who may use an inference server: holders of a key; without keys, programs on this machine that are no web page."""

from __future__ import annotations

import hmac
import os
from urllib.parse import urlsplit

from prl.config.errors import UserError
from prl.config.rules.rl import LOOPBACK_HOSTS
from prl.config.schema import RunConfig

OPEN_ROUTES = ("/health",)


def server_keys(config: RunConfig, token: str) -> list[bytes]:
    """Keys of which a request must carry one; none for an open server.

    A server started for people, on loopback and without a key of theirs, is open; within a run the token guards it.
    Raises UserError when the variable that should hold a key is unset.
    """
    for_people = config.job == "inference" and config.inference.api_key_var is None
    return [] if for_people else api_keys(config.inference.api_key_var, token)


def api_keys(variable: str | None, token: str) -> list[bytes]:
    """The run's token, and the key in the environment variable if one is named. Raises UserError when that is unset."""
    keys = [token]
    if variable is not None:
        if not os.environ.get(variable):
            raise UserError(
                f"the environment variable {variable} is not set or empty",
                where="inference.api_key_var",
                why="it names the variable that holds the API key of the inference server",
                fix=f"export {variable}=..., or inference.api_key_var=null",
            )
        keys.append(os.environ[variable])
    assert all(keys), "an empty key would let everybody in"
    return [key.encode() for key in keys]


def refusal(keys: list[bytes], path: str, authorization: str, origin: str | None, host: str) -> str | None:
    """Why a request is not let in, or None. Arguments are its path and headers; `host` is "name[:port]"."""
    if path in OPEN_ROUTES:
        return None
    if not keys:
        if origin is not None or _hostname(host) not in LOOPBACK_HOSTS:  # a foreign Host: DNS rebinding
            return "a server without an API key answers no web pages; set inference.api_key_var"
        return None
    scheme, _, given = authorization.partition(" ")
    known = [hmac.compare_digest(given.encode(errors="surrogateescape"), key) for key in keys]
    return None if scheme.lower() == "bearer" and any(known) else "wrong or missing API key"


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # brackets that do not match
        return None
