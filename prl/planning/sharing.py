"""Whether trainer and engines that have devices of their own could take turns on fewer."""

from __future__ import annotations

from prl.config.rules import violations
from prl.planning.run_plan import RunPlan


def devices_taking_turns(plan: RunPlan) -> int | None:
    """Devices that the same run takes with deployment=colocated and none named; None where it is that, or cannot be."""
    config = plan.config
    if config.job != "rl" or config.deployment.type != "disaggregated":
        return None
    unnamed = {"type": "colocated", "infer_gpu_ids": None, "train_gpu_ids": None}
    shared = config.model_copy(update={"deployment": config.deployment.model_copy(update=unnamed)})
    if violations(shared):
        return None
    return max(sum(len(role.devices) for role in plan.roles_of(kind)) for kind in ("inference", "trainer"))
