"""/prefetch_weights of a vLLM server: a version comes near in the server's process, while the engine goes on.

vLLM's own processes are told where it lies by what is added to the body of /update_weights, and read it from there.
"""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from prl.inference.bounds import parse_json
from prl.transport.kinds import PREFETCHED
from prl.transport.prefetch import Prefetched, prefetch
from prl.transport.sources import WeightSource

UPDATE, FINISH = "/update_weights", "/finish_weight_update"


class Prefetcher:
    """Of one server. It holds one version: until that is loaded, another is asked for, or nobody has it."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.held: Prefetched | None = None
        self.lock = threading.Lock()
        self.asked = 0  # what is on its way for an earlier number is not wanted any more

    async def fetch(self, body: Any) -> None:
        """Raises ValueError for a body that is none, and for weights that cannot be fetched."""
        match body:
            case {"update_info": dict(given), **rest} if rest in ({}, {"verify_checksum": True}):
                verify = True
            case {"update_info": dict(given), "verify_checksum": False, **rest} if not rest:
                verify = False
            case _:
                raise ValueError("the body must be an object: update_info, and verify_checksum=true or false")
        info = self.source.check(given)
        if info["type"] not in PREFETCHED:
            raise ValueError(f"weights that come by {info['type']} cannot be fetched ahead")
        held = self.held
        if held is not None and held.update_info == given:
            return
        self.forget()
        try:
            await asyncio.to_thread(self._fetch, info, given, verify, self.asked)
        except (OSError, MemoryError, KeyError, TypeError) as error:
            raise ValueError(f"the weights cannot be fetched: {type(error).__name__}: {error}") from error

    def _fetch(self, info: dict[str, Any], given: dict[str, Any], verify: bool, asked: int) -> None:
        found = prefetch(info, verify)
        found.update_info = given  # as it will be asked for
        with self.lock:  # here, so that nothing is lost when nobody waits for it any more
            if asked == self.asked:
                self.held, found = found, self.held
        if found is not None:
            found.close()

    def release(self) -> None:
        """What is held was loaded."""
        with self.lock:
            held, self.held = self.held, None
        if held is not None:
            held.close()

    def forget(self) -> None:
        """Also what is still on its way."""
        with self.lock:
            self.asked += 1
        self.release()

    def amend(self, body: bytes) -> bytes:
        """What vLLM is given for the body of /update_weights."""
        held = self.held
        try:
            asked = parse_json(body) if held is not None else None
        except ValueError:
            return body  # vLLM says what is wrong with it
        if held is None or not isinstance(asked, dict) or asked.get("update_info") != held.update_info:
            return body
        return json.dumps(asked | {"update_info": held.amended()}).encode()
