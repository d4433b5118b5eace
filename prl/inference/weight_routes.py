"""New weights over vLLM's routes, swapped in between two steps while requests go on.

    /init_weight_transfer_engine once; for each version
    /start_weight_update, /update_weights (once or more), /finish_weight_update

Tensors are fetched and verified off the engine's thread, and take effect all at once with their version's name at
/finish_weight_update: every token is sampled under exactly one version and says which, paused or not. What a host
transport offers may be fetched before that, while nothing is paused, by /prefetch_weights (ours: vLLM has none).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from aiohttp import web

from prl.inference.lease import Lease
from prl.inference.requests import read_object
from prl.inference.worker import EngineWorker
from prl.models.checkpoints.block_fp8 import restored
from prl.transport.kinds import DEVICE_TRANSPORTS, PREFETCH, PREFETCHED
from prl.transport.sources import WeightSource
from prl.transport.weights import NamedTensors, receive, stage


@dataclass
class WeightUpdate:
    """The update under way, if any."""

    # in which the engine computes, known when it has loaded: what comes as values and scales is multiplied into it
    dtype: Callable[[], torch.dtype]
    staged: list[NamedTensors] | None = None
    verify_checksum: bool = True  # of all updates
    near: tuple[dict[str, Any], NamedTensors] | None = None  # what was prefetched, and its update_info
    asked: int = 0  # what is on its way for an earlier number is not wanted any more

    async def bring_near(self, info: dict[str, Any]) -> None:
        """Raises as `receive` does."""
        if self.near is not None and self.near[0] == info:
            return
        self.forget()
        asked = self.asked
        found = await asyncio.to_thread(self._receive, info)
        if asked == self.asked:
            self.near = info, found

    def fetch(self, info: dict[str, Any]) -> NamedTensors:
        """Raises as `receive` does."""
        near, self.near = self.near, None  # whatever it is of, it has no further use
        if near is not None and near[0] == info:
            return near[1]
        return self._receive(info)

    def _receive(self, info: dict[str, Any]) -> NamedTensors:
        """All of a version, as the model has it."""
        return list(restored(receive(info, self.verify_checksum), self.dtype()))

    def forget(self) -> None:
        """What came near for an update that does not come, or is still on its way."""
        self.near = None
        self.asked += 1

    def get(self, route: str) -> list[NamedTensors]:
        if self.staged is None:
            raise ValueError(f"{route} before /start_weight_update")
        return self.staged


def add_weight_routes(
    app: web.Application, worker: EngineWorker, source: WeightSource, lease: Lease | None = None
) -> None:
    update = WeightUpdate(lambda: worker.engine.dtype)
    if lease is not None:
        lease.at_end.append(update.forget)

    async def init(http: web.Request) -> web.Response:
        match _object(await read_object(http), "init_info"):
            case {"verify_checksum": bool(verify), **rest} if not rest:
                update.verify_checksum = verify
            case {**given} if given:
                raise ValueError(f"init_info may say verify_checksum=true or false, not {given}")
        return web.json_response({"message": "Weight transfer initialized"})

    async def start(http: web.Request) -> web.Response:
        update.staged = []
        return web.json_response({"message": "Weight update started"})

    async def prefetch(http: web.Request) -> web.Response:
        info = source.check(_object(await read_object(http), "update_info"))
        if info["type"] not in PREFETCHED:
            raise ValueError(f"weights that come by {info['type']} cannot be fetched ahead")
        with _fetching():
            await update.bring_near(info)
        return web.json_response({"message": "Weights fetched"})

    async def receive_weights(http: web.Request) -> web.Response:
        staged = update.get("/update_weights")
        info = source.check(_object(await read_object(http), "update_info"))
        with _fetching():
            if info["type"] in DEVICE_TRANSPORTS:  # it arrives when it is loaded
                parts = chain.from_iterable(stage(info, device=worker.engine.device))
                staged.append(restored(parts, worker.engine.dtype))
            else:
                staged.append(await asyncio.to_thread(update.fetch, info))
        return web.json_response({"message": "Weights updated"})

    async def finish(http: web.Request) -> web.Response:
        version = (await read_object(http)).get("weight_version")
        if version is not None and not isinstance(version, str):
            raise ValueError("weight_version must be a string")
        staged, update.staged = update.get("/finish_weight_update"), None
        if not staged:
            raise ValueError("/finish_weight_update before any /update_weights")
        keep_salted = worker.keeps_salted
        await worker.run(lambda: worker.engine.load(chain.from_iterable(staged), version, keep_salted))
        return web.json_response({"message": "Weight update finished"})

    async def weight_info(http: web.Request) -> web.Response:
        return web.json_response({"weight_version": worker.engine.version})

    app.router.add_post("/init_weight_transfer_engine", init)
    app.router.add_post(PREFETCH, prefetch)
    app.router.add_post("/start_weight_update", start)
    app.router.add_post("/update_weights", receive_weights)
    app.router.add_post("/finish_weight_update", finish)
    app.router.add_get("/weight_info", weight_info)


@contextlib.contextmanager
def _fetching() -> Iterator[None]:
    """Raises ValueError for whatever is wrong with the source."""
    try:
        yield
    except (OSError, KeyError, TypeError) as error:
        raise ValueError(f"the weights cannot be fetched: {type(error).__name__}: {error}") from error


def _object(body: dict[str, Any], key: str) -> dict[str, Any]:
    value = body.get(key)
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be an object")
    return value
