"""The engines and the tokenizer that a run brings along, as the processes that lead it find them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from prl.config.engines import learns_truncated
from prl.config.schema import RunConfig
from prl.models.checkpoints.sources import resolve_model_path
from prl.models.text.chat import ChatRenderer
from prl.models.text.tokenizer import check_template, load_tokenizer
from prl.orchestrator.engines.answers import LARGE
from prl.orchestrator.engines.pool import EnginePool
from prl.orchestrator.engines.restarts import follow_restarts
from prl.runtime.directory.beginning import begun_path
from prl.runtime.process.child import ChildContext


def own_engines(ctx: ChildContext) -> tuple[EnginePool, Callable[[], Coroutine[Any, Any, None]]]:
    """The pool of the plan's engines, and what follows their restarts for ever."""
    config, servers = ctx.plan.config, ctx.plan.servers()
    names = [role.name for role in servers]
    kinds = [role.engine.kind for role in servers if role.engine]
    processes = [len(role.devices) for role in servers]
    router = config.inference.router.url or ctx.endpoints.get("router")
    pool = EnginePool(
        [ctx.endpoints[name] for name in names],
        config.inference,
        ctx.keys,
        kinds,
        router,
        processes,
        by_socket=config.inference.engine == "torch" and longest_answer(config) < LARGE,
    )
    return pool, partial(follow_restarts, ctx.run_dir, names, pool, config.deployment.start_timeout_s)


def longest_answer(config: RunConfig) -> int:
    """Bytes: of each token its id and log-probability, its experts, and what it was drawn from, where they are told."""
    card, inference = config.model.card, config.inference
    told = 8
    if inference.return_routed_experts:
        told += card.num_hidden_layers * card.num_experts_per_tok * (1 if card.num_experts <= 256 else 2)
    if learns_truncated(config):
        told += 4 * card.vocab_size
    return inference.max_model_len * told


def load_renderer(ctx: ChildContext) -> ChatRenderer:
    """Of the tokenizer that the policy has. Raises UserError where there is none, or none of conversations."""
    model = ctx.plan.config.model
    path = resolve_model_path(model, Path(ctx.plan.config.cache_dir), ctx.init_model_path)
    path = begun_path(ctx.run_dir, path) if ctx.resume_step else path
    tokenizer = load_tokenizer(model, path)
    check_template(tokenizer, model, path)
    return ChatRenderer(tokenizer)
