"""Which children are started again when they die. Environments run other people's code; engines hold nothing that the
trainer could not give them anew; the built-in router holds nothing at all.
"""

from __future__ import annotations

import time

from prl.config.engines import engine_groups, engine_shares
from prl.config.schema import RunConfig
from prl.config.world import takes_turns, world_of

MAX_RESTARTS = 3  # of all environments, of all engines, and of the router, among those that are recent:
WINDOW_STEPS, WINDOW_S = 10, 120.0  # what dies so rarely that training gets on is worth starting again


def why_final(config: RunConfig, role: str) -> str | None:
    """Why a child of this role is never started again; None if it may be."""
    if role == "env":
        return None
    if role == "router":
        # vllm-router binds its port itself, which the root therefore cannot keep for the next one
        return None if config.inference.router.type == "builtin" else "only the built-in router is started again"
    if role != "inference":
        return "only environments, engines and routers are started again"
    if config.job not in ("rl", "eval"):
        return "an engine that serves people is started again by them"
    if config.weight_transport.type == "ipc":
        return "weight_transport=ipc cannot take in a new engine"
    if takes_turns(config):
        return "it takes turns with the trainer, and a new one would not know whose turn it is"
    if config.inference.pd.num_prefill_gpus:
        return "engines that hand each other KV would wait for what the dead one had"
    world = world_of(config)
    if any(len(engine_shares(config, world, group)) > 1 for group in engine_groups(config, world)):
        return "the processes of one engine live and die together"
    if config.algo.max_off_policy_steps == 0:
        return "in a synchronous run a new engine would compute other batches, and the run could not be repeated"
    return None


class Restarts:
    """Those of one run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.granted: dict[str, list[tuple[int, float]]] = {}  # role -> (step, time.monotonic()) of each
        self.last: dict[str, str] = {}  # child -> class of its last failure

    def grant(self, name: str, role: str, was_ready: bool, kind: str, step: int) -> bool:
        """Whether the child may be started again after a failure of class `kind` in `step`; counted if so.

        was_ready: it was up. One that was, and died on its way back, has as many chances as are left.
        """
        again = kind == "oom" and self.last.get(name) == "oom"  # it would only do it once more
        was_up = was_ready or name in self.last
        if why_final(self.config, role) or not was_up or kind in ("config", "diverged") or again:
            return False
        if self.recent(role, step) >= MAX_RESTARTS:
            return False
        self.granted.setdefault(role, []).append((step, time.monotonic()))
        self.last[name] = kind
        return True

    def recent(self, role: str, step: int) -> int:
        """Restarts of this role within the last WINDOW_STEPS optimizer steps, or the last WINDOW_S seconds."""
        first_s, first = time.monotonic() - WINDOW_S, step - WINDOW_STEPS
        return sum(at > first or at_s > first_s for at, at_s in self.granted.get(role, []))
