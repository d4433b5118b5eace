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
    """Of one server. It holds one version: until that is loaded, or the next one comes."""

    def __init__(self, source: WeightSource) -> None:
        self.source = source
        self.held: Prefetched | None = None
        self.lock = threading.Lock()

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
        self.release()
        try:
            await asyncio.to_thread(self._fetch, info, given, verify)
        except (OSError, MemoryError, KeyError, TypeError) as error:
            raise ValueError(f"the weights cannot be fetched: {type(error).__name__}: {error}") from error

    def _fetch(self, info: dict[str, Any], given: dict[str, Any], verify: bool) -> None:
        found = prefetch(info, verify)
        found.update_info = given  # as it will be asked for
        self._hold(found)  # here, so that nothing is lost when nobody waits for it any more

    def _hold(self, found: Prefetched | None) -> None:
        with self.lock:
            held, self.held = self.held, found
            if held is not None:
                held.close()

    def release(self) -> None:
        self._hold(None)

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
