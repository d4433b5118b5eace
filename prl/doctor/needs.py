"""What a job needs of the machines that it runs on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from prl.config.schema import RunConfig, SlurmConfig
from prl.config.wanted import only_on_gpus, wanted_packages
from prl.config.world import world_of
from prl.planning.planner import make_plan


@dataclass(frozen=True)
class Needs:
    """`where`: whether the job runs on this machine, or on nodes that SLURM gives it."""

    where: Literal["here", "nodes"] = "here"
    packages: dict[str, str] = field(default_factory=dict)  # module -> the choice that needs it
    only_on_gpus: tuple[tuple[str, str], ...] = ()  # (choice, what to choose instead)
    device: str = "auto"
    nodes: int = 1
    gpus_per_node: int = 1  # device slots that the busiest node uses
    gpus_in_all: int = 1  # that one machine needs to pose as all nodes
    spans_nodes: bool = False
    trains: bool = True
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    port: int = 0

    @property
    def needs_gpus(self) -> bool:
        return bool(self.only_on_gpus)

    def why_gpus(self) -> str:
        return ", ".join(choice for choice, _ in self.only_on_gpus)


def needs_of(config: RunConfig, slurm: SlurmConfig, where: Literal["here", "nodes"]) -> Needs:
    """`slurm`: what the launcher asks for, with the keys of the point over it."""
    plan, world = make_plan(config), world_of(config)
    last = 1 if plan.num_nodes > 1 else plan.gpus_per_node  # as `refuse_too_few_gpus` (runtime/nodes/remote.py)
    return Needs(
        where=where,
        packages={package.module: choice for package, choice in wanted_packages(config, world)},
        only_on_gpus=tuple(only_on_gpus(config, world)),
        device=config.deployment.device,
        nodes=plan.num_nodes,
        gpus_per_node=plan.gpus_per_node,
        gpus_in_all=(plan.num_nodes - 1) * config.deployment.gpus_per_node + last,
        spans_nodes=plan.num_nodes > 1,
        trains=world.has_trainers,
        slurm=slurm,
        port=config.inference.port,
    )
