"""The secrets of one run: one for each kind of door, so that who holds one cannot open another.

They come into being with the process tree, reach a child through its stdin, and die with it.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields

from prl.config.errors import UserError

BITS = 128


@dataclass(frozen=True)
class RunKeys:
    """Each a random string, or empty for who does not hold it."""

    generate: str = ""  # engines and router: sample
    control: str = ""  # engines: weights, pause, sleep, caches
    train: str = ""  # orchestrator: batches out, news of weights and checkpoints in
    env: str = ""  # environments: their websocket

    def of(self, role: str) -> RunKeys:
        """What a role needs to serve and to ask."""
        return RunKeys(**{name: getattr(self, name) for name in HELD_BY.get(role, ())})


HELD_BY = {
    "inference": ("generate", "control"),
    "router": ("generate",),
    "orchestrator": ("generate", "control", "train", "env"),
    "trainer": ("train",),
    "env": ("env",),
}


def make_keys() -> RunKeys:
    return RunKeys(**{field.name: secrets.token_hex(BITS // 8) for field in fields(RunKeys)})


def users_key(key: str, name: str, what: str) -> str:
    """The user's own, in the environment variable that `key` of the configuration names. Raises UserError where it
    holds none, or what a header of HTTP cannot carry.
    """
    value = os.environ.get(name, "").strip()
    if value and value.isascii() and value.isprintable():
        return value
    raise UserError(
        f"the environment variable {name} "
        + ("holds what no HTTP header can carry" if value else "is not set or empty"),
        where=f"{key}={name}",
        why=f"it holds the {what}" + (", which is sent as letters, digits and signs of ASCII" if value else ""),
        fix=f"export {name}=..." + ("" if value else f", or {key}=null where none is needed"),
    )


def bears(authorization: str, keys: Iterable[bytes]) -> bool:
    """Whether an Authorization header carries one of the keys. Takes as long for any wrong one, whatever it holds."""
    scheme, _, given = authorization.partition(" ")
    data = given.encode(errors="surrogateescape")
    known = [bool(key) and hmac.compare_digest(data, key) for key in keys]
    return scheme.lower() == "bearer" and any(known)
