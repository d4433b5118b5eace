"""Rules of inference.router."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from prl.config.chosen import said_by_user
from prl.config.errors import UserError
from prl.config.rules.rule import Refuse, first_of
from prl.config.schema import RouterConfig, RunConfig
from prl.config.world import World

POLICY_KEYS = ("policy", "cache_threshold", "balance_abs_threshold", "balance_rel_threshold")


def router_keys_take_effect(config: RunConfig, world: World) -> Iterator[UserError]:
    router, usual = config.inference.router, RouterConfig()
    if router.type in ("none", "url"):
        for key in POLICY_KEYS:
            if said_by_user(config, f"inference.router.{key}"):
                yield UserError(
                    f"inference.router.{key} has no effect.",
                    where=f"inference.router.type={router.type}, inference.router.{key}={getattr(router, key)}",
                    why="no router of this run reads it",
                    fix=f"inference.router.type=builtin, or inference.router.{key}={getattr(usual, key)}",
                )
    if router.policy == "round_robin":
        for key in POLICY_KEYS[1:]:
            if said_by_user(config, f"inference.router.{key}"):
                yield UserError(
                    f"inference.router.{key} has no effect.",
                    where=f"inference.router.policy=round_robin, inference.router.{key}={getattr(router, key)}",
                    why="taking turns looks at neither caches nor load",
                    fix=f"inference.router.policy=cache_aware, or inference.router.{key}={getattr(usual, key)}",
                )
    unserved = not world.samples or (config.bench is not None and config.bench.target == "inference")
    if router.type != "none" and (unserved or (router.type == "url" and config.job == "inference")):
        yield UserError(
            "Nobody would send anything to the router.",
            where=f"inference.router.type={router.type}, job={config.job}",
            why="this job has no HTTP servers" if unserved else "it has no orchestrator, whose requests go to the URL",
            fix="inference.router.type=none" + ("" if router.url is None else " inference.router.url=null"),
        )


router_has_its_url = first_of(
    Refuse(
        lambda c, w: c.inference.router.type != "url" and said_by_user(c, "inference.router.url"),
        "inference.router.url has no effect.",
        where="{inference.router.type=}, {inference.router.url=}",
        why="it is the address of a router that this run does not start",
        fix="inference.router.type=url, or inference.router.url=null",
    ),
    Refuse(
        lambda c, w: c.inference.router.type == "url" and not _is_base_url(c.inference.router.url or ""),
        "The router has no address.",
        where="{inference.router.type=}, {inference.router.url=!s}",
        why="generation goes to URL/inference/v1/generate, so it begins with http(s):// and ends in no slash",
        fix="inference.router.url=http://HOST:PORT",
    ),
)

router_does_not_separate_prefill = Refuse(
    lambda c, w: c.inference.router.type in ("auto", "vllm_router") and c.inference.pd.num_prefill_gpus,
    "vllm-router is started here for engines that prefill and decode.",
    where="{inference.router.type=}, {inference.pd.num_prefill_gpus=}",
    why="its own mode for engines apart is not used yet",
    fix="inference.router.type=builtin, or none, or a URL of one that was started otherwise",
)

router_keeps_strangers_out = Refuse(
    lambda c, w: c.job == "inference" and c.inference.router.type == "vllm_router" and c.inference.api_key_var is None,
    "vllm-router would let web pages into an open server.",
    where="{inference.router.type=}, {inference.api_key_var=}",
    why="it asks for no key, and drops the Origin and Host by which engines without a key know web pages",
    fix="inference.api_key_var=PRL_API_KEY, or inference.router.type=builtin",
)


def _is_base_url(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.netloc) and not url.endswith("/")
