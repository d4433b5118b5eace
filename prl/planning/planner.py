"""RunConfig in, RunPlan out: the layout of one point, and that of the warm start before it."""

from __future__ import annotations

from prl.config.point import point_id
from prl.config.schema import CkptConfig, LoraConfig, RunConfig, SftConfig
from prl.config.world import world_of
from prl.planning.placement import place
from prl.planning.run_plan import MeshPlan, RunPlan

NOT_OF_WARM_STARTS = (
    *("env", "algo", "inference", "eval", "weight_transport", "bench", "slurm"),
    *("choices", "sweep", "swept"),
)


def make_plan(config: RunConfig) -> RunPlan:
    """The layout of one point. The configuration has passed its rules, so every size fits."""
    world = world_of(config)
    roles, mesh = place(config, world), world.mesh
    return RunPlan(
        point_id=point_id(config),
        config=config,
        mesh=MeshPlan(dp_replicate=mesh.dp_replicate, dp_shard=mesh.dp_shard, cp=mesh.cp, ep=mesh.ep),
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
