"""Rules about what trades speed for memory."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig


def offloads_exclude_each_other(config: RunConfig) -> Iterator[UserError]:
    memory = config.memory_recipe
    if not memory.fsdp_cpu_offload:
        return
    if memory.optim_cpu_offload:
        yield UserError(
            "fsdp_cpu_offload and optim_cpu_offload are both on.",
            where="memory_recipe.fsdp_cpu_offload=true, memory_recipe.optim_cpu_offload=true",
            why="fsdp_cpu_offload already keeps the optimizer state on the host",
            fix="memory_recipe.optim_cpu_offload=false",
        )
    if config.optim.type == "muon":
        yield UserError(
            "Muon cannot run with fsdp_cpu_offload.",
            where="optim.type=muon, memory_recipe.fsdp_cpu_offload=true",
            why="Muon orthogonalises whole matrices, which is far too slow on the host",
            fix="memory_recipe.fsdp_cpu_offload=false memory_recipe.optim_cpu_offload=true",
        )


def ac_targets_exist(config: RunConfig) -> Iterator[UserError]:
    known = config.model.card.ac_targets
    for target in config.memory_recipe.ac.targets:
        if target not in known:
            yield UserError(
                f"{config.model.name} has no activation checkpointing target {target!r}.",
                where="memory_recipe.ac.targets",
                why=f"its card allows: {', '.join(known) or 'none'}",
                fix=f"memory_recipe.ac.targets=[{','.join(known)}]",
            )
