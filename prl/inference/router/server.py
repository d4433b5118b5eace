"""The process `router`: one address in front of all engines of the run."""

from __future__ import annotations

import asyncio
import logging

from prl.config.schema import RunConfig
from prl.inference.bounds import body_limit
from prl.inference.guard import doors_of
from prl.inference.router import vllm_router
from prl.inference.router.proxy import Router
from prl.runtime.process.child import ChildContext
from prl.transport.serving import start_serving

log = logging.getLogger("prl.router")

POLL_S = 0.05


def main(ctx: ChildContext) -> None:
    """Entry of `router`. Raises UserError when vllm-router is asked for and not there."""
    config = ctx.plan.config
    if config.inference.router.type == "vllm_router":
        vllm_router.require()
    if takes_vllm_router(config):
        vllm_router.serve(ctx)
    else:
        asyncio.run(serve(ctx))


def takes_vllm_router(config: RunConfig) -> bool:
    """`auto` takes it where it is installed and keys guard the engines, for it guards nothing."""
    kind = config.inference.router.type
    if kind != "auto":
        return kind == "vllm_router"
    is_open = config.job == "inference" and config.inference.api_key_var is None
    taken = vllm_router.is_installed() and not is_open
    log.info("inference.router.type=auto takes %s", "vllm-router" if taken else "the built-in router")
    return taken


async def serve(ctx: ChildContext) -> None:
    """The built-in router, until asked to stop. It is ready with its first engine."""
    config = ctx.plan.config
    servers = ctx.plan.servers()
    engines = {role.name: ctx.endpoints[role.name] for role in servers}
    kinds = [role.engine.kind for role in servers if role.engine]
    limit = body_limit(config.inference.max_model_len)
    router = Router(config.inference.router, engines, ctx.keys.generate, doors_of(ctx.plan, ctx.keys), kinds, limit)
    assert ctx.listen_socket is not None
    runner = await start_serving(router.app(), ctx.listen_socket, cancelling=True)
    announced = False
    try:
        while not ctx.stop_requested:
            ctx.beat()
            if router.is_healthy and not announced:
                ctx.ready()
                announced = True
            await asyncio.sleep(POLL_S)
    finally:
        await runner.cleanup()
