"""RunConfig -> RunPlan: who gets which node and device. Pure."""

from __future__ import annotations

from prl.config.point import point_id, warm_start_key
from prl.planning.planner import make_plan, warm_start_plan
from prl.planning.run_plan import MeshPlan, RolePlan, RunPlan, plan_from_json, plan_to_json

__all__ = [
    "MeshPlan",
    "RolePlan",
    "RunPlan",
    "make_plan",
    "plan_from_json",
    "plan_to_json",
    "point_id",
    "warm_start_key",
    "warm_start_plan",
]
