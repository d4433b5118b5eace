"""Rules across config groups. Each is a small function that yields what is broken; all of them are always asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prl.config.availability import not_available
from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import closest, divisors, requested_devices, resolve_world

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")

Rule = Callable[[RunConfig], Iterator[UserError]]


def violations(config: RunConfig) -> list[UserError]:
    """Every broken rule, most basic first."""
    found = [violation for rule in COMMON_RULES for violation in rule(config)]
    if config.job != "inference":
        found += [violation for rule in TRAIN_RULES for violation in rule(config)]
    if config.job == "rl":
        found += [violation for rule in RL_RULES for violation in rule(config)]
    if config.job == "sft":
        found += [violation for rule in SFT_RULES for violation in rule(config)]
    return found + list(not_available(config))


# --- model ------------------------------------------------------------------------------------------------------------


def card_is_complete(config: RunConfig) -> Iterator[UserError]:
    card = config.model.card
    if card.num_attention_heads % card.num_key_value_heads:
        yield UserError(
            f"{card.num_attention_heads} heads cannot share {card.num_key_value_heads} key/value heads evenly.",
            where=f"model.card.num_key_value_heads={card.num_key_value_heads}",
            why="grouped-query attention gives each key/value head the same number of query heads",
            fix=f"model.card.num_key_value_heads={_next_divisor(card.num_key_value_heads, card.num_attention_heads)}",
        )
    if card.family == "qwen3_moe":
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            if getattr(card, key) == 0:
                yield UserError(
                    f"A qwen3_moe card needs {key}.",
                    where=f"model.card.{key}=0",
                    why="the architecture is a mixture of experts",
                    fix=f"model.card.{key}=N, or model.card.family=qwen3",
                )
    if card.family == "qwen3" and card.intermediate_size == 0:
        yield UserError(
            "A qwen3 card needs intermediate_size.",
            where="model.card.intermediate_size=0",
            why="a dense model has one MLP in each layer",
            fix=f"model.card.intermediate_size={2 * card.hidden_size}",
        )
    if card.num_experts_per_tok > card.num_experts:
        yield UserError(
            f"A token cannot go to {card.num_experts_per_tok} of {card.num_experts} experts.",
            where=f"model.card.num_experts_per_tok={card.num_experts_per_tok}",
            why="num_experts_per_tok is at most num_experts",
            fix=f"model.card.num_experts_per_tok={card.num_experts}",
        )


def random_model_names_its_tokenizer(config: RunConfig) -> Iterator[UserError]:
    if config.model.path is None and config.model.tokenizer is None:
        yield UserError(
            "The model has neither a checkpoint nor a tokenizer.",
            where="model.path=null, model.tokenizer=null",
            why="without a path there is no directory to take a tokenizer from",
            fix="model.tokenizer=byte",
        )


def _next_divisor(wanted: int, number: int) -> int:
    return closest(wanted, divisors(number))


# --- parallelism ------------------------------------------------------------------------------------------------------


def ep_divides_experts(config: RunConfig) -> Iterator[UserError]:
    ep, card = resolve_world(config).ep, config.model.card
    if ep == 1:
        return
    if card.num_experts == 0:
        yield UserError(
            f"{config.model.name} has no experts to spread over {ep} ranks.",
            where=f"parallelism.ep={ep}",
            why="expert parallelism needs a mixture of experts",
            fix="parallelism.ep=1, or a model with experts: model=tiny_qwen3_moe",
        )
    elif card.num_experts % ep:
        yield UserError(
            f"{card.num_experts} experts cannot be spread evenly over {ep} ranks.",
            where=f"parallelism.ep={ep}, model.card.num_experts={card.num_experts}",
            why="ep must divide num_experts",
            fix=f"parallelism.ep={_next_divisor(ep, card.num_experts)}",
        )


def ep_fits_the_fsdp_island(config: RunConfig) -> Iterator[UserError]:
    world = resolve_world(config)
    if world.ep > 1 and world.ep % world.cp:
        yield UserError(
            f"An expert group of {world.ep} ranks cannot hold whole context groups of {world.cp}.",
            where=f"parallelism.ep={world.ep}, parallelism.cp={world.cp}",
            why="ep spans cp and a part of dp_shard, so it must be a multiple of cp",
            fix=f"parallelism.ep={world.cp * max(1, world.ep // world.cp)}",
        )
    elif world.fsdp_island % world.ep:
        yield UserError(
            f"An FSDP island of {world.fsdp_island} ranks cannot be cut into expert groups of {world.ep}.",
            where=f"parallelism.ep={world.ep}, parallelism.dp_shard={world.dp_shard}, parallelism.cp={world.cp}",
            why="ep must divide dp_shard * cp",
            fix="parallelism.dp_shard=auto deployment.num_train_gpus=auto",
        )


def ulysses_divides_heads(config: RunConfig) -> Iterator[UserError]:
    cp, card = config.parallelism.cp, config.model.card
    if cp > 1 and config.parallelism.cp_style == "ulysses" and card.num_attention_heads % cp:
        ring = " or parallelism.cp_style=ring" if "ring" in card.cp_styles else ""
        yield UserError(
            f"Ulysses cannot give {card.num_attention_heads} attention heads to {cp} ranks evenly.",
            where=f"parallelism.cp={cp}, model.card.num_attention_heads={card.num_attention_heads}",
            why="Ulysses exchanges sequence for heads, so cp must divide the number of attention heads",
            fix=f"parallelism.cp={_next_divisor(cp, card.num_attention_heads)}{ring}",
        )


def model_knows_cp_style(config: RunConfig) -> Iterator[UserError]:
    style, known = config.parallelism.cp_style, config.model.card.cp_styles
    if config.parallelism.cp > 1 and style not in known:
        yield UserError(
            f"{config.model.name} does not support context parallelism by {style}.",
            where=f"parallelism.cp_style={style}",
            why=f"its card allows: {', '.join(known) or 'none'}",
            fix=f"parallelism.cp_style={known[0]}" if known else "parallelism.cp=1",
        )


def cp_divides_rows(config: RunConfig) -> Iterator[UserError]:
    cp = config.parallelism.cp
    if cp > 1 and config.seq_len % (2 * cp):
        yield UserError(
            f"A packed row of {config.seq_len} tokens cannot be split over {cp} ranks.",
            where=f"seq_len={config.seq_len}, parallelism.cp={cp}",
            why="each rank takes two equal chunks of a row, to balance a causal ring: seq_len % (2 * cp) must be 0",
            fix=f"seq_len={-(-config.seq_len // (2 * cp)) * 2 * cp}",
        )


def cp_stays_in_a_node(config: RunConfig) -> Iterator[UserError]:
    cp, per_node = config.parallelism.cp, config.deployment.gpus_per_node
    if cp > per_node and config.deployment.type == "multi_node" and not config.parallelism.allow_cp_across_nodes:
        yield UserError(
            f"A context group of {cp} ranks does not fit one node.",
            where=f"parallelism.cp={cp}, deployment.gpus_per_node={per_node}",
            why="context parallelism between nodes is bound by the network",
            fix=f"parallelism.cp={per_node}, or parallelism.allow_cp_across_nodes=true",
        )


def mesh_fills_the_devices(config: RunConfig) -> Iterator[UserError]:
    world, devices = resolve_world(config), requested_devices(config)
    if devices is not None and world.size != devices:
        yield UserError(
            f"The mesh has {world.size} ranks, and the deployment has {devices} training devices.",
            where=f"deployment.num_train_gpus={devices}, parallelism.dp_replicate={world.dp_replicate}, "
            f"parallelism.dp_shard={config.parallelism.dp_shard}, parallelism.cp={world.cp}",
            why="dp_replicate * dp_shard * cp must equal the number of training devices",
            fix="deployment.num_train_gpus=auto"
            if devices % (world.dp_replicate * world.cp)
            else "parallelism.dp_shard=auto",
        )


def custom_code_is_there(config: RunConfig) -> Iterator[UserError]:
    if config.model.impl != "hf" and config.model.card.family != "other":
        return
    memory, world = config.memory_recipe, resolve_world(config)
    for broken, where, fix in (
        (world.ep > 1, f"parallelism.ep={world.ep}", "parallelism.ep=1"),
        (world.cp > 1, f"parallelism.cp={world.cp}", "parallelism.cp=1"),
        (memory.ac.mode == "selective", "memory_recipe.ac.mode=selective", "memory_recipe.ac.mode=full"),
        (
            memory.fused_lm_head_token_chunk_size != "disabled",
            f"memory_recipe.fused_lm_head_token_chunk_size={memory.fused_lm_head_token_chunk_size}",
            "memory_recipe.fused_lm_head_token_chunk_size=disabled",
        ),
    ):
        if broken:
            why = "EP, CP, selective checkpointing and the chunked LM head need model.impl=custom"
            yield UserError("Hugging Face model code cannot do this.", where=where, why=why, fix=fix)


# --- memory -----------------------------------------------------------------------------------------------------------


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


# --- deployment -------------------------------------------------------------------------------------------------------


def gpus_suffice(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    if deployment.device != "cuda" or deployment.type == "multi_node":
        return
    train = 0 if config.job == "inference" else resolve_world(config).size
    infer = 0 if config.job == "sft" else deployment.num_infer_gpus
    needed = max(train, infer) if deployment.type == "colocated" else train + infer
    if needed > deployment.gpus_per_node:
        yield UserError(
            f"{needed} GPUs are needed and a node has {deployment.gpus_per_node}.",
            where=f"deployment.gpus_per_node={deployment.gpus_per_node}",
            why=f"{train} for training and {infer} for inference, deployment {deployment.type}",
            fix=f"deployment.gpus_per_node={needed}, or a smaller layout such as parallelism=single",
        )


def fsdp_groups_need_nodes(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    group = deployment.nodes_per_fsdp_group
    if group is None:
        return
    if deployment.type != "multi_node":
        yield UserError(
            "nodes_per_fsdp_group has no meaning on one node.",
            where=f"deployment.nodes_per_fsdp_group={group}",
            why="it cuts the training nodes into FSDP islands",
            fix="deployment.nodes_per_fsdp_group=null",
        )
    elif deployment.num_train_nodes % group:
        yield UserError(
            f"{deployment.num_train_nodes} training nodes cannot be cut into islands of {group}.",
            where=f"deployment.nodes_per_fsdp_group={group}",
            why="it must divide num_train_nodes",
            fix=f"deployment.nodes_per_fsdp_group={_next_divisor(group, deployment.num_train_nodes)}",
        )


# --- job: rl ----------------------------------------------------------------------------------------------------------


def there_is_an_engine(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    if config.job == "sft":
        return
    if deployment.num_infer_gpus == 0 or (deployment.type == "multi_node" and deployment.num_infer_nodes == 0):
        yield UserError(
            "Nobody samples: there is no inference engine.",
            where=f"deployment.num_infer_gpus={deployment.num_infer_gpus}",
            why="each engine sits on a device of its own, and this job needs at least one",
            fix="deployment.num_infer_gpus=1 deployment.num_infer_nodes=1",
        )


def colocated_engines_have_a_trainer(config: RunConfig) -> Iterator[UserError]:
    world, engines = resolve_world(config).size, config.deployment.num_infer_gpus
    if config.deployment.type == "colocated" and engines > world:
        yield UserError(
            f"{engines} engines cannot share the devices of {world} trainer ranks.",
            where=f"deployment.num_infer_gpus={engines}",
            why="colocated engines take turns with the trainer on its own devices",
            fix=f"deployment.num_infer_gpus={world}, or parallelism.dp_shard={engines}",
        )


def open_servers_have_a_key(config: RunConfig) -> Iterator[UserError]:
    inference = config.inference
    if config.job == "inference" and inference.host not in LOOPBACK_HOSTS and inference.api_key_var is None:
        yield UserError(
            "Anybody who reaches this machine could use the server.",
            where=f"inference.host={inference.host}, inference.api_key_var=null",
            why="beyond loopback an API key is required",
            fix="inference.api_key_var=PRL_API_KEY",
        )


def there_is_an_env(config: RunConfig) -> Iterator[UserError]:
    if not config.env.mix:
        yield UserError(
            "There is no environment to learn from.",
            where="env.mix",
            why="RL needs at least one source of tasks and rewards",
            fix="env=reverse_text",
        )


def groups_fill_the_batch(config: RunConfig) -> Iterator[UserError]:
    algo = config.algo
    if algo.batch_size % algo.group_size:
        smaller = max(algo.group_size, algo.batch_size // algo.group_size * algo.group_size)
        yield UserError(
            f"A batch of {algo.batch_size} rollouts cannot hold whole groups of {algo.group_size}.",
            where=f"algo.batch_size={algo.batch_size}, algo.group_size={algo.group_size}",
            why="batch_size must be a multiple of group_size",
            fix=f"algo.batch_size={smaller}",
        )
    if algo.group_size == 1:
        yield UserError(
            "A group of one rollout has no baseline.",
            where="algo.group_size=1",
            why="advantages compare the rollouts of one task with each other; alone, each is zero",
            fix="algo.group_size=8",
        )


def lengths_nest(config: RunConfig) -> Iterator[UserError]:
    inference, card = config.inference, config.model.card
    max_len, max_tokens = inference.max_model_len, inference.sampling.max_tokens
    if max_tokens >= max_len:
        yield UserError(
            f"A completion of {max_tokens} tokens leaves no room for a prompt in {max_len}.",
            where=f"inference.sampling.max_tokens={max_tokens}, inference.max_model_len={max_len}",
            why="max_model_len counts prompt plus completion",
            fix=f"inference.max_model_len={2 * max_tokens}",
        )
    if max_len > card.max_position_embeddings:
        yield UserError(
            f"The model knows {card.max_position_embeddings} positions, fewer than {max_len}.",
            where=f"inference.max_model_len={max_len}",
            why="max_model_len is at most model.card.max_position_embeddings",
            fix=f"inference.max_model_len={card.max_position_embeddings}",
        )


def a_rollout_fits_a_row(config: RunConfig) -> Iterator[UserError]:
    if config.seq_len < config.inference.max_model_len:
        yield UserError(
            f"A rollout of {config.inference.max_model_len} tokens does not fit a packed row of {config.seq_len}.",
            where=f"seq_len={config.seq_len}, inference.max_model_len={config.inference.max_model_len}",
            why="documents are not cut, so seq_len is at least max_model_len",
            fix=f"seq_len={config.inference.max_model_len}",
        )


def overlong_buffer_fits(config: RunConfig) -> Iterator[UserError]:
    algo, max_tokens = config.algo, config.inference.sampling.max_tokens
    if algo.length_rule == "dapo_overlong" and not 0 < algo.overlong_buffer <= max_tokens:
        yield UserError(
            f"An overlong buffer of {algo.overlong_buffer} tokens does not lie within {max_tokens}.",
            where=f"algo.overlong_buffer={algo.overlong_buffer}, inference.sampling.max_tokens={max_tokens}",
            why="DAPO's penalty rises over the last overlong_buffer tokens before max_tokens",
            fix=f"algo.overlong_buffer={max(1, max_tokens // 4)}",
        )


def pass_at_k_needs_sampling(config: RunConfig) -> Iterator[UserError]:
    temperature = config.eval.temperature
    if temperature is None:
        temperature = config.inference.sampling.temperature
    if config.eval.k > 1 and temperature == 0:
        yield UserError(
            f"Greedy evaluation gives the same text {config.eval.k} times.",
            where=f"eval.k={config.eval.k}, eval.temperature={config.eval.temperature}",
            why="pass@k needs different samples of one task",
            fix="eval.temperature=1.0, or eval.k=1",
        )


def experts_to_return(config: RunConfig) -> Iterator[UserError]:
    if config.inference.return_routed_experts and config.model.card.num_experts == 0:
        yield UserError(
            f"{config.model.name} has no routed experts to return.",
            where="inference.return_routed_experts=true",
            why="the model is dense",
            fix="inference.return_routed_experts=false",
        )


def shared_memory_needs_one_node(config: RunConfig) -> Iterator[UserError]:
    if config.weight_transport.type == "shared_memory" and config.deployment.type == "multi_node":
        yield UserError(
            "Shared memory does not reach another node.",
            where="weight_transport.type=shared_memory, deployment.type=multi_node",
            why="its segments live in the memory of one host",
            fix="weight_transport=filesystem",
        )


# --- job: sft ---------------------------------------------------------------------------------------------------------


def sft_follows_the_run(config: RunConfig) -> Iterator[UserError]:
    if config.sft is None:
        yield UserError(
            "There is nothing to fine-tune on.", where="sft=null", why="the job needs data", fix="data=reverse_text"
        )
        return
    for key in ("max_steps", "seq_len", "optim"):
        if getattr(config.sft, key) != getattr(config, key):
            yield UserError(
                f"sft.{key} and {key} differ.",
                where=f"sft.{key}",
                why=f"in this job sft.{key} is {key}; it has a key of its own only as a warm start",
                fix=f"set {key} instead of sft.{key}",
            )


def rows_fill_the_ranks(config: RunConfig) -> Iterator[UserError]:
    world, experts = resolve_world(config), config.model.card.num_experts
    if world.ep > 1 and (experts == 0 or experts % world.ep):
        return  # dp_shard=auto follows from an impossible ep: the number of ranks is not what must change
    ranks = world.data_ranks
    for key, sft in (("warm_start", config.warm_start), ("sft", config.sft)):
        if sft is not None and sft.batch_size % ranks:
            yield UserError(
                f"A batch of {sft.batch_size} packed rows cannot be spread evenly over {ranks} data ranks.",
                where=f"{key}.batch_size={sft.batch_size}",
                why="each data rank takes the same number of rows",
                fix=f"{key}.batch_size={-(-sft.batch_size // ranks) * ranks}",
            )


COMMON_RULES: tuple[Rule, ...] = (
    card_is_complete,
    random_model_names_its_tokenizer,
    gpus_suffice,
    there_is_an_engine,
    open_servers_have_a_key,
)
TRAIN_RULES: tuple[Rule, ...] = (
    ep_divides_experts,
    ep_fits_the_fsdp_island,
    ulysses_divides_heads,
    model_knows_cp_style,
    cp_divides_rows,
    cp_stays_in_a_node,
    mesh_fills_the_devices,
    custom_code_is_there,
    offloads_exclude_each_other,
    ac_targets_exist,
    fsdp_groups_need_nodes,
    rows_fill_the_ranks,
)
RL_RULES: tuple[Rule, ...] = (
    colocated_engines_have_a_trainer,
    there_is_an_env,
    groups_fill_the_batch,
    lengths_nest,
    a_rollout_fits_a_row,
    overlong_buffer_fits,
    pass_at_k_needs_sampling,
    experts_to_return,
    shared_memory_needs_one_node,
)
SFT_RULES: tuple[Rule, ...] = (sft_follows_the_run,)
