"""Who may use an inference server, and for what.

Sampling is for holders of a client's key; without keys, for programs on this machine that are no web page. All else
changes what the server is (weights, pauses, caches) or tells of its inside, and wants the control key, which clients
never have. What no list here names is control: so is whatever a later vLLM adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from prl.config.loopback import LOOPBACK_HOSTS
from prl.planning.run_plan import RunPlan
from prl.runtime.people.for_people import is_open
from prl.runtime.process.keys import RunKeys, bears, users_key

OPEN_ROUTES = ("/health",)
GENERATING_ROUTES = ("/inference/v1/generate", "/v1/chat/completions", "/v1/completions")
CLIENT_ROUTES = {
    *GENERATING_ROUTES,
    *("/v1/models", "/metrics", "/load", "/workers", "/version", "/ping", "/tokenize", "/detokenize"),
    *("/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/v1/embeddings"),  # vLLM's
}


@dataclass(frozen=True)
class Doors:
    """Keys that open a server's routes. `clients` None: sampling is open to this machine."""

    clients: tuple[bytes, ...] | None
    control: tuple[bytes, ...] = ()  # none: no control route is to be had


def doors_of(plan: RunPlan, keys: RunKeys) -> Doors:
    """Raises UserError when the variable that should hold a key is unset."""
    variable = plan.config.inference.api_key_var
    control: tuple[bytes, ...] = (keys.control.encode(),) if keys.control else ()
    if (named := plan.config.inference.control_key_var) is not None:
        control += (users_key("inference.control_key_var", named, "control key of this server").encode(),)
    if is_open(plan):
        return Doors(None, control)
    clients = [keys.generate.encode()]
    if variable is not None:
        clients.append(users_key("inference.api_key_var", variable, "API key of this server").encode())
    assert all(clients), "an empty key would let everybody in"
    return Doors(tuple(clients), control)


def refusal(doors: Doors, path: str, authorization: str, origin: str | None, host: str) -> str | None:
    """Why a request is not let in, or None. Arguments are its path and headers; `host` is "name[:port]"."""
    if path in OPEN_ROUTES:
        return None
    if bears(authorization, doors.control):
        return None
    if path not in CLIENT_ROUTES:
        return "this route wants the control key"
    if doors.clients is None:
        if origin is not None or _hostname(host) not in LOOPBACK_HOSTS:  # a foreign Host: DNS rebinding
            return "a server without an API key answers no web pages; set inference.api_key_var"
        return None
    return None if bears(authorization, doors.clients) else "wrong or missing API key"


def _hostname(host: str) -> str | None:
    try:
        return urlsplit(f"//{host}").hostname
    except ValueError:  # brackets that do not match
        return None
