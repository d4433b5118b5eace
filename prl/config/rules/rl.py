"""Rules of an RL run."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.engines import most_on_a_node
from prl.config.errors import UserError
from prl.config.keys import as_override
from prl.config.rules.rule import Refuse, each_of, first_of
from prl.config.schema import RunConfig
from prl.config.world import World

LAST_PORT = 65535


there_is_an_engine = Refuse(
    lambda c, w: w.has_engines and 0 in (c.deployment.num_infer_gpus, w.infer_devices),
    "Nobody samples: there is no inference engine.",
    where="{deployment.num_infer_gpus=}",
    why="each engine sits on a device of its own, and this job needs at least one",
    fix="deployment.num_infer_gpus=1 deployment.num_infer_nodes=1",
)

colocated_engines_have_a_trainer = Refuse(
    lambda c, w: c.deployment.type == "colocated" and c.deployment.num_infer_gpus > w.ranks,
    "{deployment.num_infer_gpus} engines cannot share the devices of {world.ranks} trainer ranks.",
    where="{deployment.num_infer_gpus=}",
    why="colocated engines are on the trainer's own devices",
    fix="deployment.num_infer_gpus={world.ranks}, or parallelism.dp_shard={deployment.num_infer_gpus}",
)


def every_server_has_a_port(config: RunConfig, world: World) -> Iterator[UserError]:
    """Servers of one node count up from inference.port."""
    port = config.inference.port
    if port == 0 or not world.has_engines or world.has_router:
        return
    most = most_on_a_node(config, world)
    if port + most - 1 > LAST_PORT:
        yield UserError(
            f"{most} engines on one node do not find a port each from {port} on.",
            where=f"inference.port={port}, {world.infer_devices} inference devices, tp={config.inference.tp}",
            why=f"they count up from inference.port, and the last port is {LAST_PORT}",
            fix=f"inference.port={LAST_PORT - most + 1}, or inference.port=0",
        )


there_is_an_env = Refuse(
    lambda c, w: not c.env.mix,
    "There is no environment to learn from.",
    where="env.mix",
    why="RL needs at least one source of tasks and rewards",
    fix="env=reverse_text",
)

env_id_has_its_env = each_of(
    Refuse(
        lambda c, w: any(source.id == "verifiers" and not source.args.get("id") for source in c.env.mix.values()),
        "env=verifiers needs env.id.",
        where="env.id",
        why="it says which environment of the package verifiers is meant",
        fix="env.id=NAME, env.id=package.module:function, or env.id=./path/of/module.py",
    ),
    Refuse(
        lambda c, w: (c.env.id is not None or c.env.args) and all(s.id != "verifiers" for s in c.env.mix.values()),
        "No environment takes env.id and env.args.",
        where=lambda c, w: ", ".join(_for_verifiers(c)) or "env.args",
        why="they belong to env=verifiers; the arguments of others are env.mix.NAME.args",
        fix=lambda c, w: _args_of_others(c) or ("env=verifiers" if c.env.id else "env=verifiers env.id=NAME"),
    ),
)


def _for_verifiers(config: RunConfig) -> list[str]:
    """What is said that only env=verifiers takes, as overrides."""
    said = [f"env.id={config.env.id}"] if config.env.id is not None else []
    return said + [f"env.args.{name}={as_override(value)}" for name, value in config.env.args.items()]


def _args_of_others(config: RunConfig) -> str:
    """The same, if the environments of the mix have arguments of those names; else ""."""
    said = config.env.args
    fitting = [name for name, source in config.env.mix.items() if said and said.keys() <= source.args.keys()]
    if config.env.id is not None or not fitting:
        return ""
    typed = " ".join(f"env.mix.{fitting[0]}.args.{name}={as_override(value)}" for name, value in said.items())
    return f"{typed} instead of {', '.join(f'env.args.{name}' for name in said)}"


groups_fill_the_batch = each_of(
    Refuse(
        lambda c, w: c.algo.batch_size % c.algo.group_size,
        "A batch of {algo.batch_size} rollouts cannot hold whole groups of {algo.group_size}.",
        where="{algo.batch_size=}, {algo.group_size=}",
        why="batch_size must be a multiple of group_size",
        fix=lambda c, w: f"algo.batch_size={max(1, c.algo.batch_size // c.algo.group_size) * c.algo.group_size}",
    ),
    Refuse(
        lambda c, w: c.algo.group_size == 1 and c.algo.adv_tau,
        "A group of one rollout has no baseline.",
        where="algo.group_size=1",
        why="advantages compare the rollouts of one task with each other; alone, each is zero",
        fix=lambda c, w: "algo.group_size=8" + ", or algo.adv_tau=0" * bool(c.algo.teacher.urls),
    ),
)

lengths_nest = each_of(
    Refuse(
        lambda c, w: c.inference.sampling.max_tokens >= c.inference.max_model_len,
        "A completion of {inference.sampling.max_tokens} tokens leaves no room for a prompt in "
        "{inference.max_model_len}.",
        where="{inference.sampling.max_tokens=}, {inference.max_model_len=}",
        why="max_model_len counts prompt plus completion",
        fix=lambda c, w: f"inference.max_model_len={2 * c.inference.sampling.max_tokens}",
    ),
    Refuse(
        lambda c, w: c.inference.max_model_len > c.model.card.max_position_embeddings,
        "The model knows {model.card.max_position_embeddings} positions, fewer than {inference.max_model_len}.",
        where="{inference.max_model_len=}",
        why="max_model_len is at most model.card.max_position_embeddings",
        fix="inference.max_model_len={model.card.max_position_embeddings}",
    ),
)

a_rollout_fits_a_row = Refuse(
    lambda c, w: c.seq_len < c.inference.max_model_len,
    "A rollout of {inference.max_model_len} tokens does not fit a packed row of {seq_len}.",
    where="{seq_len=}, {inference.max_model_len=}",
    why="documents are not cut, so seq_len is at least max_model_len",
    fix="seq_len={inference.max_model_len}",
)

overlong_buffer_fits = Refuse(
    lambda c, w: (
        c.algo.length_rule == "dapo_overlong" and not 0 < c.algo.overlong_buffer <= c.inference.sampling.max_tokens
    ),
    "An overlong buffer of {algo.overlong_buffer} tokens does not lie within {inference.sampling.max_tokens}.",
    where="{algo.overlong_buffer=}, {inference.sampling.max_tokens=}",
    why="DAPO's penalty rises over the last overlong_buffer tokens before max_tokens",
    fix=lambda c, w: f"algo.overlong_buffer={max(1, c.inference.sampling.max_tokens // 4)}",
)

pass_at_k_needs_sampling = Refuse(
    lambda c, w: c.eval.k > 1 and c.eval.sampling(c.inference.sampling).only_the_best,
    "Greedy evaluation gives the same text {eval.k} times.",
    where="{eval.k=}, {eval.temperature=!s}, {eval.top_k=!s}, {eval.min_p=!s}",
    why="pass@k needs different samples of one task",
    fix="eval.temperature=1.0 eval.top_k=0 eval.min_p=0, or eval.k=1",
)

sampling_leaves_a_choice = Refuse(
    lambda c, w: c.inference.sampling.only_the_best,
    "Training would sample the best token alone, and learn nothing.",
    where="{inference.sampling.temperature=:g}, {inference.sampling.top_k=}, {inference.sampling.min_p=:g}",
    why="the one token that can be drawn has probability 1, whatever the weights",
    fix="inference.sampling.temperature=1.0 inference.sampling.top_k=0 inference.sampling.min_p=0; evaluations "
    "have eval.temperature, eval.top_k and eval.min_p",
)

experts_to_return = Refuse(
    lambda c, w: c.inference.return_routed_experts and c.model.card.num_experts == 0,
    "{model.name} has no routed experts to return.",
    where="{inference.return_routed_experts=}",
    why="the model is dense",
    fix="inference.return_routed_experts=false",
)

device_transports_need_their_gpus = first_of(
    Refuse(
        lambda c, w: c.deployment.device == "cpu",
        "{weight_transport.type} moves weights between GPUs.",
        where="{weight_transport.type=}, {deployment.device=}",
        fix="weight_transport=filesystem",
    ),
    Refuse(
        lambda c, w: c.deployment.type == "colocated" and c.weight_transport.type == "nccl",
        "{weight_transport.type} does not serve a deployment that is {deployment.type}.",
        where="{weight_transport.type=}, {deployment.type=}",
        why="NCCL refuses two ranks on one GPU",
        fix="weight_transport=ipc",
    ),
    Refuse(
        lambda c, w: c.deployment.type != "colocated" and c.weight_transport.type == "ipc",
        "{weight_transport.type} does not serve a deployment that is {deployment.type}.",
        where="{weight_transport.type=}, {deployment.type=}",
        why="trainer and engines share no GPU",
        fix="weight_transport=nccl",
    ),
    Refuse(
        lambda c, w: c.deployment.type == "colocated" and w.ranks < c.deployment.num_infer_gpus,
        "Some engines have no trainer rank on their GPU.",
        where="{weight_transport.type=}, {deployment.num_infer_gpus=}",
        why="the trainer has {world.ranks} ranks, and each serves the engine on its own GPU",
        fix="weight_transport=shared_memory, or more trainer ranks",
    ),
    # NCCL has one rank on each GPU; CUDA IPC reaches only who is on the same one
    given=lambda c, w: c.weight_transport.type in ("nccl", "ipc"),
)


def adapters_travel_alone(config: RunConfig, world: World) -> Iterator[UserError]:
    """weight_transport=lora: there are adapters, and an engine that loads them."""
    lora, card = config.memory_recipe.lora, config.model.card
    if config.weight_transport.type != "lora":
        return
    for wrong, what, where, why, fix in (
        (lora.rank == 0, "There are no adapters to send.", "memory_recipe.lora.rank=0",
         "all weights are trained", "memory=lora, or weight_transport=filesystem"),
        (lora.rank > 512, f"vLLM has no room for adapters of rank {lora.rank}.", f"memory_recipe.lora.rank={lora.rank}",
         "its largest rank is 512", "memory_recipe.lora.rank=512, or weight_transport=filesystem"),
        ("experts" in lora.targets, "Adapters of stacked experts are not those of vLLM.",
         f"memory_recipe.lora.targets=[{','.join(lora.targets)}]", "it reads adapters of single experts",
         "memory_recipe.lora.targets without experts, or weight_transport=filesystem"),
        (config.inference.engine != "vllm", "The built-in engine loads whole models.",
         f"inference.engine={config.inference.engine}", "/v1/load_lora_adapter is vLLM's",
         "inference=vllm, or weight_transport=filesystem"),
        (card.kv_lora_rank > 0, "vLLM's latent attention does not take all adapters.",
         f"model.card.family={card.family}", "it multiplies by matrices that it made of kv_b_proj when it loaded",
         "weight_transport=filesystem, which adds adapters to the weights that it sends"),
        (world.takes_turns, "Adapters do not survive an engine's sleep.",
         "deployment.type=colocated", "sleeping drops or moves the memory that they are in",
         "deployment.infer_memory_fraction=0.4, deployment=disaggregated, or weight_transport=ipc"),
    ):  # fmt: skip
        if wrong:
            yield UserError(what, where=f"weight_transport.type=lora, {where}", why=why, fix=fix)


shared_memory_needs_one_node = Refuse(
    lambda c, w: c.weight_transport.type == "shared_memory" and w.spans_nodes,
    "Shared memory does not reach another node.",
    where="{weight_transport.type=}, {deployment.type=}, {deployment.gpus_per_node=}",
    why="its segments live in the memory of one host",
    fix="weight_transport=tcp, or weight_transport=filesystem",
)
