"""Whether trainer and engines that have devices of their own could take turns on fewer."""

from __future__ import annotations

from prl.config.rules import violations
from prl.config.schema import RunConfig
from prl.config.world import infer_devices, resolve_world


def devices_taking_turns(config: RunConfig) -> int | None:
    """Devices that the same run takes with deployment=colocated; None where it is that already, or cannot be."""
    if config.job != "rl" or config.deployment.type != "disaggregated":
        return None
    shared = config.model_copy(update={"deployment": config.deployment.model_copy(update={"type": "colocated"})})
    return None if violations(shared) else max(resolve_world(shared).size, infer_devices(shared))
