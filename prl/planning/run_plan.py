"""RunConfig -> RunPlan: which roles exist, where they sit, how large their worlds are.

Pure: no clock, GPU, network or environment is read, so the same configuration always gives the same bytes. A run
freezes its plan to `plan.json`; its processes read that and never compose a configuration again.
"""

from __future__ import annotations

import json
from typing import Literal

from pydantic import BaseModel, ConfigDict

from prl.config.engines import EngineKind
from prl.config.point import point_id
from prl.config.schema import CkptConfig, LoraConfig, RunConfig, SftConfig
from prl.config.world import resolve_world

RoleName = Literal["inference", "router", "orchestrator", "trainer", "env"]

NOT_OF_WARM_STARTS = (
    *("env", "algo", "inference", "eval", "weight_transport", "bench", "slurm"),
    *("choices", "sweep", "swept"),
)


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


def make_plan(config: RunConfig) -> RunPlan:
    """The layout of one point. The configuration has passed its rules, so every size fits."""
    from prl.planning.placement import place

    world = resolve_world(config)
    roles = place(config, world.size)
    return RunPlan(
        point_id=point_id(config),
        config=config,
        mesh=MeshPlan(dp_replicate=world.dp_replicate, dp_shard=world.dp_shard, cp=world.cp, ep=world.ep),
        num_nodes=1 + max(role.node for role in roles),
        gpus_per_node=1 + max((device for role in roles for device in role.devices), default=-1),
        roles=roles,
    )


def warm_start_plan(plan: RunPlan) -> RunPlan | None:
    """The supervised job that runs before the first rollout, or None. Its result is cached under `warm_start_key`.

    It is an ordinary SFT job of the same model on the trainer's layout, without checkpoints on the way and without a
    wandb run of its own. It trains all weights, with LoRA too: the result is the base to which adapters are added, and
    the cache key leaves out the memory recipe. What belongs to RL alone, and labels, are not handed on: nothing that is
    not in the key may have an influence.
    """
    config = plan.config
    sft = config.warm_start
    if sft is None:
        return None
    return make_plan(
        config.model_copy(
            update={
                "job": "sft",
                "name": "warm_start",
                "seed": sft.seed,
                "max_steps": sft.max_steps,
                "seq_len": sft.seq_len,
                "optim": sft.optim,
                "sft": SftConfig(**{key: getattr(sft, key) for key in SftConfig.model_fields}),
                "warm_start": None,
                "output_dir": None,
                **{
                    key: RunConfig.model_fields[key].get_default(call_default_factory=True)
                    for key in NOT_OF_WARM_STARTS
                },
                "memory_recipe": config.memory_recipe.model_copy(update={"lora": LoraConfig()}),
                "ckpt": CkptConfig(interval=0, keep=1, at_end=False, asynchronous=False, export_hf=True),
                "logging": config.logging.model_copy(
                    update={"wandb": config.logging.wandb.model_copy(update={"mode": "disabled"})}
                ),
            }
        )
    )


def plan_to_json(plan: RunPlan) -> str:
    """Stable text: sorted keys, one trailing newline."""
    return json.dumps(plan.model_dump(mode="json"), sort_keys=True, indent=1) + "\n"


def plan_from_json(text: str) -> RunPlan:
    """The inverse of `plan_to_json`."""
    return RunPlan.model_validate_json(text)
