"""Rules of an RL run."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.engines import most_on_a_node
from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import has_engines, has_router, infer_devices, resolve_world, spans_nodes, takes_turns

LAST_PORT = 65535
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")


def there_is_an_engine(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    if not has_engines(config):
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
            why="colocated engines are on the trainer's own devices",
            fix=f"deployment.num_infer_gpus={world}, or parallelism.dp_shard={engines}",
        )


def every_server_has_a_port(config: RunConfig) -> Iterator[UserError]:
    """Servers of one node count up from inference.port."""
    port = config.inference.port
    if port == 0 or not has_engines(config) or has_router(config):
        return
    most = most_on_a_node(config)
    if port + most - 1 > LAST_PORT:
        yield UserError(
            f"{most} engines on one node do not find a port each from {port} on.",
            where=f"inference.port={port}, {infer_devices(config)} inference devices, tp={config.inference.tp}",
            why=f"they count up from inference.port, and the last port is {LAST_PORT}",
            fix=f"inference.port={LAST_PORT - most + 1}, or inference.port=0",
        )


def there_is_an_env(config: RunConfig) -> Iterator[UserError]:
    if not config.env.mix:
        yield UserError(
            "There is no environment to learn from.",
            where="env.mix",
            why="RL needs at least one source of tasks and rewards",
            fix="env=reverse_text",
        )


def env_id_has_its_env(config: RunConfig) -> Iterator[UserError]:
    env = config.env
    if any(source.id == "verifiers" and not source.args.get("id") for source in env.mix.values()):
        yield UserError(
            "env=verifiers needs env.id.",
            where="env.id",
            why="it says which environment of the package verifiers is meant",
            fix="env.id=NAME, env.id=package.module:function, or env.id=./path/of/module.py",
        )
    if (env.id is not None or env.args) and all(source.id != "verifiers" for source in env.mix.values()):
        yield UserError(
            "No environment takes env.id and env.args.",
            where=f"env.id={env.id}, env.args={env.args}",
            why="they belong to env=verifiers; the arguments of others are env.mix.NAME.args",
            fix="env=verifiers",
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
    sampling = config.eval.sampling(config.inference.sampling)
    if config.eval.k > 1 and sampling.only_the_best:
        yield UserError(
            f"Greedy evaluation gives the same text {config.eval.k} times.",
            where=f"eval.k={config.eval.k}, eval.temperature={config.eval.temperature}, "
            f"eval.top_k={config.eval.top_k}, eval.min_p={config.eval.min_p}",
            why="pass@k needs different samples of one task",
            fix="eval.temperature=1.0 eval.top_k=0 eval.min_p=0, or eval.k=1",
        )


def sampling_leaves_a_choice(config: RunConfig) -> Iterator[UserError]:
    sampling = config.inference.sampling
    if sampling.only_the_best:
        yield UserError(
            "Training would sample the best token alone, and learn nothing.",
            where=f"inference.sampling.temperature={sampling.temperature:g}, "
            f"inference.sampling.top_k={sampling.top_k}, inference.sampling.min_p={sampling.min_p:g}",
            why="the one token that can be drawn has probability 1, whatever the weights",
            fix="inference.sampling.temperature=1.0 inference.sampling.top_k=0 inference.sampling.min_p=0; evaluations "
            "have eval.temperature, eval.top_k and eval.min_p",
        )


def experts_to_return(config: RunConfig) -> Iterator[UserError]:
    if config.inference.return_routed_experts and config.model.card.num_experts == 0:
        yield UserError(
            f"{config.model.name} has no routed experts to return.",
            where="inference.return_routed_experts=true",
            why="the model is dense",
            fix="inference.return_routed_experts=false",
        )


def device_transports_need_their_gpus(config: RunConfig) -> Iterator[UserError]:
    """NCCL has one rank on each GPU; CUDA IPC reaches only who is on the same one."""
    deployment, transport = config.deployment, config.weight_transport.type
    colocated = deployment.type == "colocated"
    if transport not in ("nccl", "ipc"):
        return
    if deployment.device == "cpu":
        yield UserError(
            f"{transport} moves weights between GPUs.",
            where=f"weight_transport.type={transport}, deployment.device=cpu",
            fix="weight_transport=filesystem",
        )
    elif colocated == (transport == "nccl"):
        yield UserError(
            f"{transport} does not serve a deployment that is {deployment.type}.",
            where=f"weight_transport.type={transport}, deployment.type={deployment.type}",
            why="NCCL refuses two ranks on one GPU" if colocated else "trainer and engines share no GPU",
            fix=f"weight_transport={'ipc' if colocated else 'nccl'}",
        )
    elif colocated and resolve_world(config).size < deployment.num_infer_gpus:
        yield UserError(
            "Some engines have no trainer rank on their GPU.",
            where=f"weight_transport.type=ipc, deployment.num_infer_gpus={deployment.num_infer_gpus}",
            why=f"the trainer has {resolve_world(config).size} ranks, and each serves the engine on its own GPU",
            fix="weight_transport=shared_memory, or more trainer ranks",
        )


def adapters_travel_alone(config: RunConfig) -> Iterator[UserError]:
    """weight_transport=lora: there are adapters, and an engine that loads them."""
    lora = config.memory_recipe.lora
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
        (takes_turns(config), "Adapters do not survive an engine's sleep.",
         "deployment.type=colocated", "sleeping drops or moves the memory that they are in",
         "deployment.infer_memory_fraction=0.4, deployment=disaggregated, or weight_transport=ipc"),
    ):  # fmt: skip
        if wrong:
            yield UserError(what, where=f"weight_transport.type=lora, {where}", why=why, fix=fix)


def shared_memory_needs_one_node(config: RunConfig) -> Iterator[UserError]:
    deployment = config.deployment
    if config.weight_transport.type == "shared_memory" and spans_nodes(config):
        yield UserError(
            "Shared memory does not reach another node.",
            where=f"weight_transport.type=shared_memory, deployment.type={deployment.type}, "
            f"deployment.gpus_per_node={deployment.gpus_per_node}",
            why="its segments live in the memory of one host",
            fix="weight_transport=tcp, or weight_transport=filesystem",
        )
