"""Rules about what trades speed for memory."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.families import FAMILIES
from prl.config.rules.rule import Refuse, each_of
from prl.config.schema import ATTENTION, ModelCard, RunConfig
from prl.config.world import World

offloads_exclude_each_other = each_of(
    Refuse(
        lambda c, w: c.memory_recipe.optim_cpu_offload,
        "fsdp_cpu_offload and optim_cpu_offload are both on.",
        where="{memory_recipe.fsdp_cpu_offload=}, {memory_recipe.optim_cpu_offload=!s}",
        why="fsdp_cpu_offload already keeps the optimizer state on the host",
        fix="memory_recipe.optim_cpu_offload=false",
    ),
    Refuse(
        lambda c, w: c.optim.type == "muon",
        "Muon cannot run with fsdp_cpu_offload.",
        where="optim.type=muon, memory_recipe.fsdp_cpu_offload=true",
        why="Muon orthogonalises whole matrices, which is far too slow on the host",
        fix="memory_recipe.fsdp_cpu_offload=false memory_recipe.optim_cpu_offload=true",
    ),
    given=lambda c, w: c.memory_recipe.fsdp_cpu_offload,
)

the_host_steps_elementwise = Refuse(
    lambda c, w: c.memory_recipe.optim_cpu_offload == "full" and c.optim.type == "muon",
    "Muon cannot step on the host.",
    where="optim.type=muon, memory_recipe.optim_cpu_offload=full",
    why="the host holds each rank's shards, and Muon orthogonalises whole matrices",
    fix="memory_recipe.optim_cpu_offload=true",
)


def ac_targets_exist(config: RunConfig, world: World) -> Iterator[UserError]:
    known = config.model.card.ac_targets
    for target in config.memory_recipe.ac.targets:
        if target not in known:
            yield UserError(
                f"{config.model.name} has no activation checkpointing target {target!r}.",
                where="memory_recipe.ac.targets",
                why=f"its card allows: {', '.join(known) or 'none'}",
                fix=f"memory_recipe.ac.targets=[{','.join(known)}]",
            )


ac_keys_take_effect = each_of(
    Refuse(
        lambda c, w: c.memory_recipe.ac.freq > 1 and c.memory_recipe.ac.mode != "full",
        "No layers are counted for checkpointing every {memory_recipe.ac.freq}.",
        where="{memory_recipe.ac.freq=}, {memory_recipe.ac.mode=}",
        why="freq belongs to mode full; selective checkpointing works in every layer",
        fix="memory_recipe.ac.mode=full, or memory_recipe.ac.freq=1",
    ),
    Refuse(
        lambda c, w: c.memory_recipe.ac.targets and c.memory_recipe.ac.mode != "selective",
        "Nothing is recomputed by target in mode {memory_recipe.ac.mode}.",
        where="{memory_recipe.ac.targets=}, {memory_recipe.ac.mode=}",
        why="targets belong to mode selective; full recomputes whole layers, none recomputes nothing",
        fix="memory_recipe.ac.mode=selective, or memory_recipe.ac.targets=[]",
    ),
)


ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
LATENT_LINEARS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
STATE_LINEARS = ("in_proj",)  # PEFT takes no adapters of out_proj, whose weight fused kernels read by themselves
LATENT_EXPERT_LINEARS = ("fc1_latent_proj", "fc2_latent_proj")
MLP_LINEARS = ("gate_proj", "up_proj", "down_proj")


def lora_targets_exist(config: RunConfig, world: World) -> Iterator[UserError]:
    """Of our own models; what linears transformers' have is seen when they are built."""
    lora, card = config.memory_recipe.lora, config.model.card
    if not lora.rank:
        return
    ours = config.model.impl != "hf" and card.is_native
    experts, mlps = ("experts",) if card.num_experts else (), MLP_LINEARS if card.has_dense_mlps else ()
    known = (*_linears(card), *experts, *mlps)
    if (family := FAMILIES.get(card.family)) is not None and not family.gated:
        known = tuple(name for name in known if name != "gate_proj")
    unknown = [target for target in lora.targets if (target not in known if ours else target == "experts")]
    if unknown or not lora.targets:
        yield UserError(
            f"{config.model.name} has no LoRA target {', '.join(unknown)}." if unknown else "LoRA has no targets.",
            where=f"memory_recipe.lora.targets=[{','.join(lora.targets)}]",
            why=f"its linears are: {', '.join(known)}"
            if ours
            else "experts are stacked by the layers of prl/models alone",
            fix=f"memory_recipe.lora.targets=[{','.join(known) if ours else ATTENTION}]",
        )


def _linears(card: ModelCard) -> tuple[str, ...]:
    """Around attention, states and latents of experts."""
    states = STATE_LINEARS if card.state_layers else ()
    latents = LATENT_EXPERT_LINEARS if card.moe_latent_size else ()
    return (*attention_linears(card), *states, *latents)


def attention_linears(card: ModelCard) -> tuple[str, ...]:
    """Of families of transformers' own, whose models tell when they are built, what most have."""
    if not card.attention_layers:
        return ()
    if not card.kv_lora_rank:
        return ATTENTION_LINEARS
    return (*(("q_a_proj", "q_b_proj") if card.q_lora_rank else ("q_proj",)), *LATENT_LINEARS)


GROUPED_ALIGNMENT = 8  # elements of bfloat16 in the 16 bytes to which grouped GEMMs align rows


def lora_fits_the_kernels(config: RunConfig, world: World) -> Iterator[UserError]:
    lora = config.memory_recipe.lora
    if not lora.rank:
        return
    if config.model.fp8 != "none":
        yield UserError(
            "LoRA cannot be combined with FP8.",
            where=f"memory_recipe.lora.rank={lora.rank}, model.fp8={config.model.fp8}",
            why="adapters sit on plain linears, and LoRA leaves out a third of what FP8 would speed up",
            fix="model.fp8=none",
        )
    if "experts" in lora.targets and config.model.dtype == "bfloat16" and lora.rank % GROUPED_ALIGNMENT:
        rank = -(-lora.rank // GROUPED_ALIGNMENT) * GROUPED_ALIGNMENT
        yield UserError(
            f"Adapters of experts cannot have rank {lora.rank} in bfloat16.",
            where=f"memory_recipe.lora.rank={lora.rank}, memory_recipe.lora.targets=[{','.join(lora.targets)}]",
            why=f"grouped GEMMs want rows of 16 bytes, which are {GROUPED_ALIGNMENT} elements",
            fix=f"memory_recipe.lora.rank={rank}",
        )
