"""Who may change the weights of a server that somebody started by hand: one run at a time, for as long as it renews.

    GET /lease       what the server holds (model, lengths, dtype), and who has a lease
    POST /lease      {"run", "life", "host", "weights": {"transport", "directory", "hosts", "timeout_s"}}: take or
                     renew it
    DELETE /lease    give it up

A run says its name (`X-Prl-Run`) with every request, and is answered only while it holds the lease; samples it gets
only from weights that it has brought itself, so that a server that was started again serves it nothing old. What
changes a leased server is refused to all others. A run that dies renews nothing: LEASE_S later the server resumes what
the run may have paused, and is free.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prl.config.schema import RunConfig
from prl.inference.guard import CLIENT_ROUTES, GENERATING_ROUTES, OPEN_ROUTES
from prl.runtime.directory.files import replace_file
from prl.runtime.external import LEASE, LEASE_S, RUN_HEADER, model_facts
from prl.transport.sources import WeightSource

BRINGS_WEIGHTS = "/finish_weight_update"
MOST = 4096  # characters of a text


class LeasedWeights(BaseModel):
    """From where a run's weights come."""

    model_config = ConfigDict(extra="forbid", strict=True)

    transport: Literal["filesystem", "tcp"]
    directory: str = Field(pattern=r"^/", max_length=MOST)
    hosts: list[str] = Field(max_length=64)
    timeout_s: float = Field(gt=0, le=1e8, allow_inf_nan=False)


class Claim(BaseModel):
    """Body of POST /lease."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str = Field(pattern=r"^[A-Za-z0-9._-]{1,200}$")
    life: str = Field(pattern=r"^[0-9a-f]{1,64}$")  # of the process that claims: a next one brings its own weights
    host: str = Field(max_length=256)
    weights: LeasedWeights


class Lease:
    """Of one server. `resume` lets its engine go on, whether it is paused or not."""

    def __init__(
        self,
        config: RunConfig,
        source: WeightSource,
        resume: Callable[[], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert source.leased, "a server with a trainer has no lease to give"
        self.facts, self.source, self.resume, self.clock = model_facts(config), source, resume, clock
        self.server = secrets.token_hex(8)  # tells engines apart, whatever addresses they are reached by
        self.grant = ""  # names the lease since it was taken: another one after a restart, and after it had run out
        self.claim: Claim | None = None
        self.until = 0.0
        self.renewals = 0
        self.has_weights = False  # of the run that holds it
        self.at_end: list[Callable[[], None]] = []  # what else is forgotten when nobody has it any more
        Path(source.leased).unlink(missing_ok=True)

    @property
    def holder(self) -> Claim | None:
        return self.claim if self.clock() < self.until else None

    def tell(self) -> dict[str, Any]:
        """The answer to GET."""
        lease = None
        if (held := self.holder) is not None:
            left_s = self.until - self.clock()
            lease = {"run": held.run, "host": held.host, "renewals": self.renewals, "expires_in_s": left_s}
        return {**self.facts, "server": self.server, "lease": lease}

    async def answer(self, method: str, run: str | None, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and body of a request to /lease. Raises ValueError for a body that is none."""
        if method == "GET":
            return 200, self.tell()
        if method == "DELETE":
            if self.claim is not None and run == self.claim.run:
                await self.end()
            return 200, self.tell()
        if method != "POST":
            return 405, {}
        try:
            claim = Claim.model_validate(body)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        held = self.holder
        if held is not None and held.run != claim.run:
            return 409, self.tell()
        if held is None or held != claim:
            await self.end()
            source = WeightSource(claim.weights.transport, claim.weights.directory, "", tuple(claim.weights.hosts),
                                  claim.weights.timeout_s)  # fmt: skip
            replace_file(Path(self.source.leased), json.dumps(asdict(source)))
            self.grant = secrets.token_hex(8)
        self.claim, self.until, self.renewals = claim, self.clock() + LEASE_S, self.renewals + 1
        return 200, {**self.tell(), "grant": self.grant}

    def refusal(self, method: str, path: str, run: str | None) -> tuple[int, str] | None:
        """Status and reason, where a request that may come in is not to be carried out now."""
        held = self.holder
        if path in OPEN_ROUTES or path == LEASE:
            return None
        if run is not None:
            if held is None or held.run != run:
                # of a run that will come back with its lease and its weights: no fault of the request
                status = 503 if path in CLIENT_ROUTES else 409
                return status, f"run {run} has no lease on this engine (POST {LEASE})"
            if path in GENERATING_ROUTES and not self.has_weights:
                return 503, f"run {run} has brought no weights yet"
            return None
        if held is not None and method != "GET" and path not in CLIENT_ROUTES:
            return 409, f"run {held.run} on {held.host} holds this engine, and changes it alone (header {RUN_HEADER})"
        return None

    def told(self, path: str, status: int) -> None:
        """A request that was carried out."""
        if path == BRINGS_WEIGHTS and status == 200 and self.holder is not None:
            self.has_weights = True

    async def tick(self) -> None:
        """Every now and then: free a server whose run renews nothing any more."""
        if self.claim is not None and self.holder is None:
            await self.end()

    async def end(self) -> None:
        """Nobody has it; what was paused goes on."""
        was_held, self.claim, self.until, self.has_weights = self.claim is not None, None, 0.0, False
        Path(self.source.leased).unlink(missing_ok=True)
        for forget in self.at_end:
            forget()
        if was_held:
            with contextlib.suppress(RuntimeError):  # of an engine that is dead or has not begun
                await self.resume()
