"""Rules of inference.engine=vllm."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.block_fp8 import BLOCK_FP8, sends_blocks, to_sixteen_bits
from prl.config.chosen import said_by_user
from prl.config.engines import engine_groups, learns_truncated, logprobs_of_kept, vllm_arguments_of
from prl.config.errors import UserError
from prl.config.families import FAMILIES
from prl.config.keys import as_override
from prl.config.rules.rule import Refuse
from prl.config.schema import Group, InferenceConfig, RunConfig
from prl.config.world import World

# arguments of `vllm serve` that have a key of their own, and that key
OWN_KEYS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "served_model_name": "model.name",
    "dtype": "inference.dtype",
    "max_num_seqs": "inference.max_num_seqs",
    "max_model_len": "inference.max_model_len",
    "enable_prefix_caching": "inference.prefix_caching",
    "enable_return_routed_experts": "inference.return_routed_experts",
    "tensor_parallel_size": "inference.tp",
    "data_parallel_size": "inference.dp",
    "data_parallel_hybrid_lb": "inference.dp_load_balancing",
    "data_parallel_external_lb": "inference.dp_load_balancing",
    "enable_expert_parallel": "inference.expert_parallel",
    "all2all_backend": "inference.all2all_backend",
    "quantization": "inference.quantization",
    "kv_offloading_size": "inference.kv_offload.cpu_gib",
    "kv_offloading_backend": "inference.kv_offload.type",
    "host": "inference.host",
    "port": "inference.port",
    "api_key": "inference.api_key_var",
    "seed": "seed",
}
# arguments without which a run does not work, or whose work the run does itself
OF_THE_RUN = (
    *("weight_transfer_config", "logprobs_mode", "enable_scale_out", "enable_server_load_tracking"),
    "enable_prompt_tokens_details",
    *("uds", "config", "headless", "grpc", "api_server_count", "nnodes", "node_rank", "master_addr", "master_port"),
    *("data_parallel_size_local", "data_parallel_start_rank", "data_parallel_rank"),
    *("data_parallel_address", "data_parallel_rpc_port", "data_parallel_multi_port_external_lb"),
)
# keys of inference that mean nothing to the built-in engine
OF_VLLM = (
    *("tp", "dp", "dp_load_balancing", "expert_parallel", "all2all_backend", "quantization", "deep_gemm"),
    *("env", "vllm", "pd", "kv_offload"),
)


WHY_IDLE = "the built-in engine sits on one device and has no arguments of vLLM"


def vllm_keys_take_effect(config: RunConfig, world: World) -> Iterator[UserError]:
    inference = config.inference
    if inference.engine == "vllm":
        return
    usual = InferenceConfig()
    for key in OF_VLLM:
        value, default = getattr(inference, key), getattr(usual, key)
        # what a site says for its vLLM binds no other engine; where engines lie follows from the others in any case
        said = said_by_user(config, f"inference.{key}") if key in ("env", "vllm") else value != default
        said = said and not (key == "quantization" and sends_blocks(config))  # it computes with the numbers sent
        if said:
            shown = value.model_dump(exclude_defaults=True) if isinstance(value, Group) else value
            remedy, why = f"inference.{key}={as_override(default)}, or inference=vllm", WHY_IDLE
            if key == "quantization":
                remedy = f"inference.quantization=null, or {BLOCK_FP8}, or inference=vllm{to_sixteen_bits(config)}"
                why = "the built-in engine takes weights as they come, and computes in inference.dtype"
            elif key == "deep_gemm" and not sends_blocks(config):
                remedy += " inference.quantization=fp8" + to_sixteen_bits(config)
            elif isinstance(value, Group | dict):
                remedy = f"inference=vllm, or leave inference.{key} out"
            yield UserError(
                f"inference.{key} has no effect.",
                where=f"inference.engine={inference.engine}, inference.{key}={shown}",
                why=why,
                fix=remedy,
            )


sleeping_fits_the_engine = Refuse(
    lambda c, w: w.takes_turns and c.inference.sleep_level == 0 and c.inference.engine != "vllm",
    "The built-in engine hands its memory over when it sleeps.",
    where="{inference.sleep_level=}, {inference.engine=}",
    fix="inference.sleep_level=1, or inference=vllm",
)

routed_experts_are_cached = Refuse(
    lambda c, w: c.inference.engine == "vllm" and c.inference.return_routed_experts and not c.inference.prefix_caching,
    "vLLM returns routed experts only with its prefix cache.",
    where="{inference.return_routed_experts=}, {inference.prefix_caching=}",
    why="it keeps them block by block under the keys of that cache",
    fix="inference.prefix_caching=true, or inference=torch",
)

heads_are_tied_in_vllm = Refuse(
    lambda c, w: (
        c.inference.engine == "vllm"
        and c.model.card.tie_word_embeddings
        and c.model.card.family in FAMILIES
        and not FAMILIES[c.model.card.family].vllm_ties
    ),
    "vLLM cannot run {model.name} with a head that is its embedding.",
    where="{inference.engine=}, {model.card.tie_word_embeddings=}",
    why="its model of {model.card.family} has a head of its own, which nothing would fill",
    fix=lambda c, w: "inference=torch" if c.model.path else "model.card.tie_word_embeddings=false, or inference=torch",
)


def vllm_runs_on_cpus(config: RunConfig, world: World) -> Iterator[UserError]:
    """Where it is said that there are no GPUs; else a machine tells (prl/runtime/preflight.py)."""
    if world.has_engines and config.inference.engine == "vllm" and config.deployment.device == "cpu":
        yield from off_cpus(config)


def off_cpus(config: RunConfig) -> Iterator[UserError]:
    """That vLLM cannot run the model on CPUs, or not with adapters, if so."""
    family = FAMILIES.get(config.model.card.family)
    if family is not None and family.vllm_off_cpus:
        yield UserError(
            f"vLLM cannot run {config.model.name} on CPUs.",
            where=f"inference.engine=vllm, deployment.device={config.deployment.device}, "
            f"model.card.family={config.model.card.family}",
            why=family.vllm_off_cpus,
            fix="inference=torch, or deployment.device=cuda",
        )
    elif config.weight_transport.type == "lora" and config.model.card.num_experts:
        yield UserError(
            "vLLM on CPUs has no adapters beside experts.",
            where=f"weight_transport.type=lora, deployment.device={config.deployment.device}, "
            f"model.card.num_experts={config.model.card.num_experts}",
            why="where adapters are enabled its experts are Triton's kernels, which are for GPUs",
            fix="weight_transport=filesystem, which adds adapters to the weights that it sends",
        )


def vllm_says_what_it_kept(config: RunConfig, world: World) -> Iterator[UserError]:
    """Training under truncated sampling: vLLM names at most so many of the tokens that could be drawn."""
    inference, sampling = config.inference, config.inference.sampling
    if inference.engine != "vllm" or not learns_truncated(config):
        return
    if sampling.top_k == 0:
        yield UserError(
            "vLLM cannot say which tokens it could have drawn, unless they are few.",
            where=f"inference.engine=vllm, inference.sampling.top_p={sampling.top_p}, "
            f"inference.sampling.min_p={sampling.min_p}, inference.sampling.top_k=0",
            why="training renormalises over the tokens that were kept, and vLLM names the top_k most probable ones",
            fix=f"inference.sampling.top_k={min(128, config.model.card.vocab_size)}, or inference=torch, or, with "
            "eval.top_p and eval.min_p for evaluations, inference.sampling.top_p=1 inference.sampling.min_p=0",
        )
        return
    for group in engine_groups(config, world):
        allowed = vllm_arguments_of(config, group.kind).get("max_logprobs", -1)
        needed = logprobs_of_kept(config)
        own = "max_logprobs" in group.own.vllm
        key = f"inference.{f'pd.{group.kind}.' if own else ''}vllm.max_logprobs"
        if isinstance(allowed, int) and 0 <= allowed < needed:
            yield UserError(
                f"vLLM may name {allowed} tokens, of {needed} that it may have kept.",
                where=f"{key}={allowed}, inference.sampling.top_k={sampling.top_k}",
                why="training renormalises over the tokens that were kept; equally probable ones may come to top_k",
                fix=f"{key}={needed}, or leave it out",
            )


def vllm_arguments_are_free(config: RunConfig, world: World) -> Iterator[UserError]:
    pd = config.inference.pd
    groups = {"": config.inference.vllm, "pd.prefill.": pd.prefill.vllm, "pd.decode.": pd.decode.vllm}
    for where, name in ((where, name) for where, arguments in groups.items() for name in arguments):
        key = f"inference.{where}vllm.{name}"
        if name in OWN_KEYS:
            yield UserError(
                f"vLLM's {name} has a key of its own here.",
                where=key,
                why="what it says must hold for the orchestrator and the plan, too",
                fix=f"set {OWN_KEYS[name]} and remove {key}",
            )
        elif name in OF_THE_RUN or not name.isidentifier():
            yield UserError(
                f"vLLM's {name} is not yours to set.",
                where=key,
                why="the run depends on the value that it gives it" if name in OF_THE_RUN else "names are words with _",
                fix=f"remove {key}",
            )
        elif name == "kv_transfer_config" and (pd.num_prefill_gpus or config.inference.kv_offload.type != "none"):
            yield UserError(
                "Two places say how KV travels.",
                where=f"{key}, inference.pd, inference.kv_offload",
                why="prefill and decode apart, and offloading, are connectors of kv_transfer_config",
                fix=f"remove {key}, or inference.pd.num_prefill_gpus=0 inference.kv_offload.type=none",
            )
