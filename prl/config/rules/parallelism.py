"""Rules about the mesh, EP and CP."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.errors import UserError
from prl.config.families import FAMILIES
from prl.config.foreign import is_transformers_code
from prl.config.keys import as_override
from prl.config.rules.rule import Refuse, each_of, first_of, next_divisor
from prl.config.schema import ParallelismConfig, RunConfig
from prl.config.world import World, closest, divisors

ep_divides_experts = first_of(
    Refuse(
        lambda c, w: c.model.card.num_experts == 0,
        "{model.name} has no experts to spread over {world.mesh.ep} ranks.",
        where="parallelism.ep={world.mesh.ep}",
        why="expert parallelism needs a mixture of experts",
        fix="parallelism.ep=1, or a model with experts: model=tiny_qwen3_moe",
    ),
    Refuse(
        lambda c, w: c.model.card.num_experts % w.mesh.ep,
        "{model.card.num_experts} experts cannot be spread evenly over {world.mesh.ep} ranks.",
        where="parallelism.ep={world.mesh.ep}, {model.card.num_experts=}",
        why="ep must divide num_experts",
        fix=lambda c, w: f"parallelism.ep={fitting_ep(c, w)}",
    ),
    given=lambda c, w: w.mesh.ep > 1 and not is_transformers_code(c.model),  # see custom_code_is_there
)


def ep_fits_the_fsdp_island(config: RunConfig, world: World) -> Iterator[UserError]:
    mesh = world.mesh
    if mesh.ep > 1 and mesh.ep % mesh.cp:
        yield UserError(
            f"An expert group of {mesh.ep} ranks cannot hold whole context groups of {mesh.cp}.",
            where=f"parallelism.ep={mesh.ep}, parallelism.cp={mesh.cp}",
            why="ep spans cp and a part of dp_shard, so it must be a multiple of cp",
            fix=f"parallelism.ep={fitting_ep(config, world)}",
        )
    elif mesh.fsdp_island % mesh.ep:
        yield UserError(
            f"An FSDP island of {mesh.fsdp_island} ranks cannot be cut into expert groups of {mesh.ep}.",
            where=f"parallelism.ep={mesh.ep}, parallelism.dp_shard={mesh.dp_shard}, parallelism.cp={mesh.cp}",
            why="ep must divide dp_shard * cp",
            fix=f"parallelism.ep={fitting_ep(config, world)}"
            + (
                ""
                if config.deployment.type == "multi_node"
                else ", or parallelism.dp_shard=auto deployment.num_train_gpus=auto"
                + (" parallelism.dp_replicate=1" if config.parallelism.dp_replicate == "auto" else "")
            ),
        )


def fitting_ep(config: RunConfig, world: World) -> int:
    """The size of expert groups next to the one asked for that divides the experts, holds whole context groups and,
    where the devices are given, fills the FSDP island.
    """
    mesh, devices = world.mesh, world.train_devices
    fixed = devices is not None or config.parallelism.dp_shard != "auto"
    fits = [
        ep
        for ep in divisors(config.model.card.num_experts)
        if ep % mesh.cp == 0 and (not fixed or mesh.fsdp_island % ep == 0)
    ]
    return closest(mesh.ep, fits) if fits else 1


DEEPEP_SIZES = (2, 4, 8, 16, 24, 32, 64, 128)  # expert groups for which every DeepEP 1.x has kernel settings
# bounds of DeepEP 1.2.1's kernels inside a node (csrc/kernels/intranode.cu): a thread for each expert of a rank in what
# counts them, a lane for each choice of a token, half a token's bytes beside a barrier in a warp's 8 KiB, and halves of
# whole 16 bytes
DEEPEP_EXPERTS, DEEPEP_CHOICES, DEEPEP_HIDDEN, DEEPEP_MULTIPLE = 128, 32, 8184, 16


deepep_fits_the_mesh = each_of(
    Refuse(
        lambda c, w: w.mesh.ep == 1,
        "There is nothing for DeepEP to carry.",
        where="parallelism.ep_comm_backend=deepep, parallelism.ep=1",
        why="with one rank in an expert group every expert is at hand",
        fix="parallelism.ep_comm_backend=torch, or parallelism.ep=8",
    ),
    Refuse(
        lambda c, w: w.mesh.ep not in (1, *DEEPEP_SIZES),
        "DeepEP has no settings for expert groups of {world.mesh.ep} ranks.",
        where="parallelism.ep={world.mesh.ep}",
        why=f"its kernels are tuned for {', '.join(map(str, DEEPEP_SIZES))} ranks",
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: w.mesh.ep > 1 and w.ep_nodes == 1 and c.model.card.num_experts > DEEPEP_EXPERTS * w.mesh.ep,
        "DeepEP cannot count {model.card.num_experts} experts on {world.mesh.ep} ranks.",
        where="parallelism.ep_comm_backend=deepep, parallelism.ep={world.mesh.ep}, {model.card.num_experts=}",
        why=f"its kernels inside a node have a thread for each expert of a rank, and {DEEPEP_EXPERTS} of them",
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: w.mesh.ep > 1 and c.model.card.num_experts_per_tok > DEEPEP_CHOICES,
        "DeepEP cannot carry tokens to {model.card.num_experts_per_tok} experts each.",
        where="parallelism.ep_comm_backend=deepep, {model.card.num_experts_per_tok=}",
        why=f"its kernels take {DEEPEP_CHOICES} at most, a lane of a warp for each",
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: w.mesh.ep > 1 and w.ep_nodes == 1 and c.model.card.expert_width > DEEPEP_HIDDEN,
        "DeepEP cannot carry rows of {model.card.expert_width} numbers.",
        where="parallelism.ep_comm_backend=deepep, {model.card.hidden_size=}",
        why=f"its kernels inside a node have 8 KiB for half a row of bfloat16 and a barrier: {DEEPEP_HIDDEN} at most",
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: w.mesh.ep > 1 and c.model.card.expert_width % DEEPEP_MULTIPLE,
        "DeepEP cannot carry rows of {model.card.expert_width} numbers.",
        where="parallelism.ep_comm_backend=deepep, {model.card.hidden_size=}",
        why=f"its kernels copy rows of bfloat16 in two halves of whole 16 bytes: multiples of {DEEPEP_MULTIPLE}",
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: c.parallelism.deepep_num_sms % 2,
        "DeepEP cannot use {parallelism.deepep_num_sms} multiprocessors.",
        where="{parallelism.deepep_num_sms=}",
        why="one half of them sends, the other receives, so the number must be even",
        fix=lambda c, w: f"parallelism.deepep_num_sms={c.parallelism.deepep_num_sms + 1}",
    ),
    given=lambda c, w: c.parallelism.ep_comm_backend == "deepep",
)


hierarchy_has_its_nodes = first_of(
    Refuse(
        lambda c, w: w.node_ranks % w.mesh.ep == 0,
        "No expert group leaves its node.",
        where="parallelism.ep_comm_backend=hierarchical, parallelism.ep={world.mesh.ep}",
        why=lambda c, w: (
            f"a node holds {w.node_ranks} ranks; inside it a token goes straight to the ranks of its experts"
        ),
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: w.mesh.ep % w.node_ranks,
        "Expert groups of {world.mesh.ep} ranks do not consist of whole nodes.",
        where="parallelism.ep={world.mesh.ep}, {deployment.gpus_per_node=}",
        why="from node to node a token goes to the rank with the same place, so each has one in every node: ep must be "
        "a multiple of gpus_per_node",
        fix="parallelism.ep_comm_backend=torch",
    ),
    given=lambda c, w: c.parallelism.ep_comm_backend == "hierarchical",
)


def deepep_keys_take_effect(config: RunConfig, world: World) -> Iterator[UserError]:
    parallelism, usual = config.parallelism, ParallelismConfig()
    if parallelism.ep_comm_backend == "deepep":
        return
    for key in ("deepep_num_sms", "deepep_token_chunk_size"):
        value = getattr(parallelism, key)
        if value != getattr(usual, key):
            yield UserError(
                f"Nothing reads {key}.",
                where=f"parallelism.{key}={value}, parallelism.ep_comm_backend={parallelism.ep_comm_backend}",
                why="it is a key of DeepEP's",
                fix=f"parallelism.{key}={as_override(getattr(usual, key))}",
            )


pieces_travel = Refuse(
    lambda c, w: c.parallelism.ep_pieces > 1 and (w.mesh.ep == 1 or c.parallelism.ep_comm_backend == "deepep"),
    "Tokens cannot travel in {parallelism.ep_pieces} pieces.",
    where="{parallelism.ep_pieces=}, parallelism.ep={world.mesh.ep}, {parallelism.ep_comm_backend=}",
    why=lambda c, w: (
        "with one rank in an expert group they do not travel"
        if w.mesh.ep == 1
        else "DeepEP cuts by parallelism.deepep_token_chunk_size"
    ),
    fix="parallelism.ep_pieces=1",
)

deepep_can_run = each_of(
    Refuse(
        lambda c, w: c.deployment.device == "cpu",
        "DeepEP runs on GPUs only.",
        where="parallelism.ep_comm_backend=deepep, deployment.device=cpu",
        why="it is a set of CUDA kernels",
        fix="parallelism.ep_comm_backend=torch",
    ),
    Refuse(
        lambda c, w: c.model.dtype != "bfloat16",
        "DeepEP cannot carry {model.dtype}.",
        where="parallelism.ep_comm_backend=deepep, {model.dtype=}",
        why="its training kernels move rows of bfloat16",
        fix="model.dtype=bfloat16, or parallelism.ep_comm_backend=torch",
    ),
    # whether it is installed is asked where the job starts: the machine that plans it may have no GPU
    given=lambda c, w: c.parallelism.ep_comm_backend == "deepep",
)


def ulysses_divides_heads(config: RunConfig, world: World) -> Iterator[UserError]:
    cp, card = config.parallelism.cp, config.model.card
    if cp > 1 and world.cp_style == "ulysses" and card.num_attention_heads % cp:
        rows = "" if config.seq_len % (2 * cp) == 0 else f" seq_len={-(-config.seq_len // (2 * cp)) * 2 * cp}"
        others = "".join(f" or parallelism.cp_style={style}{rows}" for style in card.cp_styles if style != "ulysses")
        yield UserError(
            f"Ulysses cannot give {card.num_attention_heads} attention heads to {cp} ranks evenly.",
            where=f"parallelism.cp={cp}, model.card.num_attention_heads={card.num_attention_heads}",
            why="Ulysses exchanges sequence for heads, so cp must divide the number of attention heads",
            fix=f"parallelism.cp={next_divisor(cp, card.num_attention_heads)}{others}",
        )


def ulysses_divides_states(config: RunConfig, world: World) -> Iterator[UserError]:
    cp, card = config.parallelism.cp, config.model.card
    if cp > 1 and world.cp_style == "ulysses" and card.mamba_num_heads % cp:
        yield UserError(
            f"Ulysses cannot give {card.mamba_num_heads} heads of state to {cp} ranks evenly.",
            where=f"parallelism.cp={cp}, model.card.mamba_num_heads={card.mamba_num_heads}",
            why="Ulysses exchanges sequence for heads, so cp must divide the number of heads of state-space layers",
            fix=f"parallelism.cp={next_divisor(cp, card.mamba_num_heads)}",
        )


def card_claims_what_layers_can(config: RunConfig, world: World) -> Iterator[UserError]:
    """A card may leave out ways of its family, and not invent any."""
    card = config.model.card
    family = FAMILIES.get(card.family)
    claims = () if family is None else (("cp_styles", family.cp_styles), ("ac_targets", family.ac_targets))
    for key, can in claims:
        said = getattr(card, key)
        if not set(said) <= set(can):
            yield UserError(
                f"The layers of {card.family} have no {', '.join(one for one in said if one not in can)}.",
                where=f"model.card.{key}=[{','.join(said)}]",
                why=f"they are built for {', '.join(can)}",
                fix=f"model.card.{key}=[{','.join(can)}]",
            )


model_knows_cp_style = Refuse(
    lambda c, w: c.parallelism.cp > 1 and w.cp_style not in c.model.card.cp_styles,
    "{model.name} does not support context parallelism by {parallelism.cp_style}.",
    where="{parallelism.cp_style=}",
    why=lambda c, w: f"its card allows: {', '.join(c.model.card.cp_styles) or 'none'}",
    fix=lambda c, w: (
        f"parallelism.cp_style={c.model.card.cp_styles[0]}" if c.model.card.cp_styles else "parallelism.cp=1"
    ),
)


def cp_divides_rows(config: RunConfig, world: World) -> Iterator[UserError]:
    cp = config.parallelism.cp
    spread = world.cp_style != "ulysses" or config.model.card.num_attention_heads % cp == 0
    if cp > 1 and spread and config.seq_len % (2 * cp):
        yield UserError(
            f"A packed row of {config.seq_len} tokens cannot be split over {cp} ranks.",
            where=f"seq_len={config.seq_len}, parallelism.cp={cp}",
            why="each rank takes two equal chunks of a row, an early one and a late one, so that all attend to as many "
            "tokens: seq_len % (2 * cp) must be 0",
            fix=f"seq_len={-(-config.seq_len // (2 * cp)) * 2 * cp}",
        )


cp_stays_in_a_node = Refuse(
    lambda c, w: (
        c.parallelism.cp > c.deployment.gpus_per_node and w.spans_nodes and not c.parallelism.allow_cp_across_nodes
    ),
    "A context group of {parallelism.cp} ranks does not fit one node.",
    where="{parallelism.cp=}, {deployment.gpus_per_node=}",
    why="context parallelism between nodes is bound by the network",
    fix="parallelism.cp={deployment.gpus_per_node}, or parallelism.allow_cp_across_nodes=true",
)


def name_of_devices(config: RunConfig) -> str:
    """The keys that say how many training devices there are, with their values."""
    deployment = config.deployment
    if deployment.type != "multi_node":
        return f"deployment.num_train_gpus={deployment.num_train_gpus}"
    return (
        f"deployment.num_train_nodes={deployment.num_train_nodes}, deployment.gpus_per_node={deployment.gpus_per_node}"
    )


one_size_fills_the_devices = Refuse(
    lambda c, w: c.parallelism.dp_replicate == c.parallelism.dp_shard == "auto",
    "Both the replicas of the weights and the ranks that share one are said to be as many as there are devices.",
    where="{parallelism.dp_replicate=}, {parallelism.dp_shard=}",
    why="dp_replicate * dp_shard * cp must equal the number of training devices, and only one can follow from it",
    fix="parallelism.dp_replicate=1, or parallelism.dp_shard=1",
)


def mesh_fills_the_devices(config: RunConfig, world: World) -> Iterator[UserError]:
    mesh, devices = world.mesh, world.train_devices
    if devices is not None and mesh.size != devices:
        fix = "parallelism.dp_shard=auto"
        if devices % (mesh.dp_replicate * mesh.cp):
            several = config.deployment.type == "multi_node"
            fix = "parallelism=single parallelism.dp_shard=auto" if several else "deployment.num_train_gpus=auto"
        elif config.parallelism.dp_replicate == "auto":
            fix = "parallelism.dp_replicate=1 parallelism.dp_shard=auto"
        yield UserError(
            f"The mesh has {mesh.size} ranks, and the deployment has {devices} training devices.",
            where=f"{name_of_devices(config)}, parallelism.dp_replicate={mesh.dp_replicate}, "
            f"parallelism.dp_shard={config.parallelism.dp_shard}, parallelism.cp={mesh.cp}",
            why="dp_replicate * dp_shard * cp must equal the number of training devices",
            fix=fix,
        )


def custom_code_is_there(config: RunConfig, world: World) -> Iterator[UserError]:
    model, memory, mesh = config.model, config.memory_recipe, world.mesh
    if not is_transformers_code(model):
        return
    if model.impl == "custom":
        yield UserError(
            f"There is no code of ours for {model.name}.",
            where="model.impl=custom, model.card.family=other",
            why=f"prl/models knows the families {', '.join(FAMILIES)}",
            fix="model.impl=hf",
        )
    for broken, where, fix in (
        (mesh.ep > 1, f"parallelism.ep={mesh.ep}", "parallelism.ep=1"),
        (mesh.cp > 1, f"parallelism.cp={mesh.cp}", "parallelism.cp=1"),
        (memory.ac.mode == "selective", "memory_recipe.ac.mode=selective", "memory_recipe.ac.mode=full"),
        (memory.compile, "memory_recipe.compile=true", "memory_recipe.compile=false"),
        (model.fp8 != "none", f"model.fp8={model.fp8}", "model.fp8=none"),
        (
            model.router_bias_update_rate > 0,
            f"model.router_bias_update_rate={model.router_bias_update_rate}",
            "model.router_bias_update_rate=0",
        ),
        (
            config.job == "rl" and config.inference.return_routed_experts,
            "inference.return_routed_experts=true",
            "inference.return_routed_experts=false",
        ),
        (
            memory.fused_lm_head_token_chunk_size != "disabled",
            f"memory_recipe.fused_lm_head_token_chunk_size={memory.fused_lm_head_token_chunk_size}",
            "memory_recipe.fused_lm_head_token_chunk_size=disabled",
        ),
    ):
        if broken:
            ours = "model.impl=custom" if model.card.is_native else f"a family of prl/models ({', '.join(FAMILIES)})"
            why = (
                "EP, CP, selective checkpointing, compilation, FP8, router biases, replayed routing and the chunked LM "
                f"head need {ours}"
            )
            spread = mesh.ep > 1 and fix == "parallelism.ep=1"
            what = "spread experts over ranks" if spread else "do this"
            yield UserError(f"Hugging Face model code cannot {what}.", where=where, why=why, fix=fix)
