"""RunConfig -> RunPlan: which roles exist, where they sit, how large their worlds are.

Pure: no clock, GPU, network or environment is read, so the same configuration always gives the same bytes. A run
freezes its plan to `plan.json`; its processes read that and never compose a configuration again.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

from prl.config.engines import EngineKind
from prl.config.schema import RunConfig

RoleName = Literal["inference", "router", "orchestrator", "trainer", "env"]


class Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EnginePlan(Frozen):
    """What an inference process is of which engine: data-parallel ranks start_rank to start_rank + dp_local of dp.

    `head` is the process whose node the others of its engine meet at. Only who `serves` answers HTTP.
    """

    index: int
    kind: EngineKind
    tp: int
    dp: int
    start_rank: int
    dp_local: int
    serves: bool
    head: str


class RolePlan(Frozen):
    """One process. `devices` are indices on its node; a device is a GPU, or a CPU slot where there are none.

    `rank`, `local_rank` and `world_size` count the processes of one role: trainer ranks, or inference engines.
    """

    role: RoleName
    index: int
    name: str
    node: int
    devices: tuple[int, ...]
    rank: int
    local_rank: int
    world_size: int
    engine: EnginePlan | None = None  # of inference processes


class MeshPlan(Frozen):
    """The trainer's device mesh. `ep` spans `cp` and a part of `dp_shard`."""

    dp_replicate: int
    dp_shard: int
    cp: int
    ep: int

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that see different data."""
        return self.dp_replicate * self.dp_shard


class RunPlan(Frozen):
    """Everything the process tree needs to know. `gpus_per_node` counts the device slots that the busiest node uses."""

    point_id: str
    config: RunConfig
    mesh: MeshPlan
    num_nodes: int
    gpus_per_node: int
    roles: tuple[RolePlan, ...]

    @property
    def num_devices(self) -> int:
        """Of trainer and engines, over all nodes; those that share one count it once."""
        return len({(role.node, device) for role in self.roles for device in role.devices})

    def servers(self) -> tuple[RolePlan, ...]:
        """Inference processes that answer HTTP."""
        return tuple(role for role in self.roles if role.engine is not None and role.engine.serves)

    def roles_of(self, role: RoleName) -> tuple[RolePlan, ...]:
        return tuple(plan for plan in self.roles if plan.role == role)


def plan_to_json(plan: RunPlan) -> str:
    """Stable text: sorted keys, one trailing newline."""
    return json.dumps(plan.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"


def plan_from_json(text: str) -> RunPlan:
    """The inverse of `plan_to_json`."""
    return RunPlan.model_validate_json(text)
