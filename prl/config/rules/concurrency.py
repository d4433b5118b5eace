"""Rules of inference.concurrency."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.chosen import said_by_user
from prl.config.errors import UserError
from prl.config.rules.rule import Refuse
from prl.config.schema import ConcurrencyConfig, RunConfig
from prl.config.world import World

ADAPTIVE_KEYS = ("min", "start", "kv_low", "kv_high")
KEY = "inference.concurrency"


def adaptive_keys_take_effect(config: RunConfig, world: World) -> Iterator[UserError]:
    concurrency = config.inference.concurrency
    if concurrency.mode == "adaptive":
        return
    for name in ADAPTIVE_KEYS:
        if said_by_user(config, f"{KEY}.{name}"):
            yield UserError(
                f"{KEY}.{name} has no effect.",
                where=f"{KEY}.mode=fixed, {KEY}.{name}={getattr(concurrency, name)}",
                why="as many rollouts run as inference.max_concurrent_rollouts says",
                fix=f"{KEY}.mode=adaptive",
            )


synchronous_runs_do_not_adapt = Refuse(
    lambda c, w: c.inference.concurrency.mode == "adaptive" and c.algo.max_off_policy_steps == 0,
    "A synchronous run cannot follow the engines' load.",
    where="{inference.concurrency.mode=}, {algo.max_off_policy_steps=}",
    why="all rollouts of its step run together, so that the same seed gives the same bits",
    fix="inference.concurrency.mode=fixed, or algo.max_off_policy_steps=1",
)


def adaptive_bounds_nest(config: RunConfig, world: World) -> Iterator[UserError]:
    concurrency, maximum = config.inference.concurrency, config.inference.max_concurrent_rollouts
    if concurrency.mode == "fixed":
        return
    start = maximum if concurrency.start is None else concurrency.start
    if not concurrency.min <= start <= maximum:
        yield UserError(
            "The bounds of the limit of rollouts do not nest.",
            where=f"{KEY}.min={concurrency.min}, {KEY}.start={concurrency.start}, "
            f"inference.max_concurrent_rollouts={maximum}",
            why="min is at most start, and start at most max_concurrent_rollouts",
            fix=f"inference.max_concurrent_rollouts={max(concurrency.min, start)} {KEY}.start=null",
        )
    if concurrency.kv_low >= concurrency.kv_high:
        yield UserError(
            "The limit of rollouts would grow and be trimmed at the same KV usage.",
            where=f"{KEY}.kv_low={concurrency.kv_low}, {KEY}.kv_high={concurrency.kv_high}",
            why="it rests between the two",
            fix=f"{KEY}.kv_low={ConcurrencyConfig().kv_low} {KEY}.kv_high={ConcurrencyConfig().kv_high}",
        )


adapting_needs_metrics = Refuse(
    lambda c, w: c.inference.concurrency.mode == "adaptive" and c.inference.vllm.get("disable_log_stats"),
    "Without its statistics vLLM does not say how full it is.",
    where="{inference.concurrency.mode=}, inference.vllm.disable_log_stats=true",
    fix="inference.vllm.disable_log_stats=false",
)
