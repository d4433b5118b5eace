"""What each of vLLM's processes is given: arguments of `vllm serve` and environment. Imports nothing of vLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prl.config.block_fp8 import quantization_config, sends_blocks
from prl.config.cards import shared_choices
from prl.config.engines import learns_truncated, logprobs_of_kept, own_of, vllm_arguments_of
from prl.config.families import FAMILIES
from prl.config.schema import ModelCard, RunConfig
from prl.config.world import takes_turns
from prl.planning.engine_memory import bounded_cache_bytes, engine_share, expands_latents, kv_cache_bytes
from prl.planning.run_plan import EnginePlan, RolePlan

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has room for; a smaller one takes the next
# kv_transfer_params of a request that is to leave its KV for another engine
PREFILL_ONLY = {"do_remote_decode": True, "do_remote_prefill": False}
BACKEND = "prl"  # weight_transfer_config.backend, as our plugin registers it

JOINED = ("compilation_config", "hf_overrides")  # arguments of which inference.vllm may add to what is said here
MAX_PREFILL_TOKENS = 8192  # per step, as in the built-in engine


def server_arguments(
    config: RunConfig,
    role: RolePlan,
    model_path: str,
    endpoints: Mapping[str, str],
    *,
    on_cpu: bool,
    old: bool = False,
    gpu_bytes: int | None = None,
) -> dict[str, Any]:
    """Arguments of one process under vLLM's names; `inference.vllm` comes last and may add or override.

    Args:
        model_path: the checkpoint directory of the initial weights.
        endpoints: where an engine of several processes meets, under `meeting_point(head)`.
        old: for vLLM 0.23.
        gpu_bytes: memory of each of its GPUs, where that is known: by it an engine that sleeps has a smaller cache.
    """
    inference, model, engine = config.inference, config.model, role.engine
    assert engine is not None
    arguments: dict[str, Any] = {
        "model": model_path,
        "served_model_name": [model.name],
        "dtype": model.dtype if inference.dtype == "auto" else inference.dtype,
        "seed": config.seed,
        "max_num_seqs": inference.max_num_seqs,
        "max_model_len": inference.max_model_len,
        "enable_prefix_caching": inference.prefix_caching,
        "enable_return_routed_experts": inference.return_routed_experts,
        "tensor_parallel_size": engine.tp,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, which the loss needs
        **({"max_logprobs": logprobs_of_kept(config)} if learns_truncated(config) else {}),
        "weight_transfer_config": {"backend": BACKEND},
        "enable_server_load_tracking": True,  # /load
        "enable_prompt_tokens_details": True,  # how much of a prompt was in the prefix cache
        "disable_uvicorn_access_log": True,
    }
    if not old:
        arguments["enable_scale_out"] = True  # /inference/v1/generate, which 0.23 always serves
    if model.tokenizer not in (None, "byte"):
        arguments["tokenizer"] = model.tokenizer
    if config.deployment.type == "colocated" and not on_cpu:
        sleeps = takes_turns(config) and inference.sleep_level > 0
        arguments |= {"enable_sleep_mode": sleeps, "gpu_memory_utilization": engine_share(config)}
        if gpu_bytes and (cache := bounded_cache_bytes(config, gpu_bytes)):
            arguments["kv_cache_memory_bytes"] = cache
    arguments |= data_parallel_arguments(config, engine, endpoints) | expert_arguments(config, engine)
    if config.weight_transport.type == "lora":
        rank = next(rank for rank in LORA_RANKS if rank >= config.memory_recipe.lora.rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if sends_blocks(config):
        arguments["load_format"] = "dummy"  # the checkpoint is in another form; the trainer brings weights before work
    elif inference.quantization is not None:
        arguments["quantization"] = inference.quantization
    if connectors := kv_connectors(config, engine):
        arguments["kv_transfer_config"] = connectors
    if overrides := config_overrides(config):
        arguments["hf_overrides"] = overrides
    if on_cpu:
        arguments |= cpu_arguments(config, engine.tp)
    theirs = vllm_arguments_of(config, engine.kind)
    for name in JOINED:
        if isinstance(ours := arguments.get(name), dict) and isinstance(theirs.get(name), dict):
            theirs = {**theirs, name: ours | theirs[name]}
    return arguments | theirs


def config_overrides(config: RunConfig) -> dict[str, Any]:
    """What vLLM is to read in config.json beyond what the checkpoint's says: routers' logits in float32, where the
    trainer has them so and the family's key for it is there; which layers share keys that one before them chose; and
    that weights come in blocks of FP8.
    """
    family, card = FAMILIES.get(config.model.card.family), config.model.card
    quantised = {"quantization_config": quantization_config(card)} if sends_blocks(config) else {}
    known = {} if family is None else {**family.router_facts(card.router_dtype), **shared_choices(card)}
    return {**known, **quantised}


def kept_parameters(config: RunConfig) -> dict[str, Any] | None:
    """Sampling parameters of training by which an engine says what tokens were drawn from, vLLM by the most probable
    ones; None where sampling is not truncated.
    """
    if not learns_truncated(config):
        return None
    asked: dict[str, Any] = {"extra_args": {"kept_tokens": True}}
    return asked | ({"logprobs": logprobs_of_kept(config)} if config.inference.engine == "vllm" else {})


def meeting_point(role_name: str) -> str:
    """Endpoint at which the processes of an engine find its head: vLLM's data_parallel_rpc_port."""
    return f"{role_name}/dp"


def kv_side_channel(role_name: str) -> str:
    """Endpoint at which other engines ask for the KV of this process: the first of dp_local ports."""
    return f"{role_name}/kv"


def data_parallel_arguments(config: RunConfig, engine: EnginePlan, endpoints: Mapping[str, str]) -> dict[str, Any]:
    """Which ranks of its engine a process has, and where it meets the others."""
    arguments: dict[str, Any] = {"data_parallel_size": engine.dp}
    if engine.dp_local == engine.dp:
        return arguments
    address, port = endpoints[meeting_point(engine.head)].rsplit(":", 1)
    arguments |= {"data_parallel_address": address, "data_parallel_rpc_port": int(port)}
    if config.inference.dp_load_balancing == "external":
        return arguments | {"data_parallel_rank": engine.start_rank}
    arguments["data_parallel_size_local"] = engine.dp_local
    if config.inference.dp_load_balancing == "hybrid":
        return arguments | {"data_parallel_start_rank": engine.start_rank, "data_parallel_hybrid_lb": True}
    if not engine.serves:
        arguments |= {"data_parallel_start_rank": engine.start_rank, "headless": True}
    return arguments


def expert_arguments(config: RunConfig, engine: EnginePlan) -> dict[str, Any]:
    """Wide EP: experts over all devices of an engine, and how tokens get there."""
    arguments: dict[str, Any] = {}
    if config.inference.expert_parallel:
        arguments["enable_expert_parallel"] = True
    backend = own_of(config, engine.kind).all2all_backend or config.inference.all2all_backend
    if backend is not None:
        arguments["all2all_backend"] = backend
    return arguments


def kv_connectors(config: RunConfig, engine: EnginePlan) -> dict[str, Any]:
    """kv_transfer_config: NIXL between prefill and decode, and where KV is kept beyond the GPU; both if both."""
    offload = config.inference.kv_offload
    parts: list[dict[str, Any]] = []
    if engine.kind != "both":
        parts.append({"kv_connector": "NixlConnector", "kv_role": "kv_both"})
    if offload.type == "native":
        extra: dict[str, Any] = {"cpu_bytes_to_use": int(offload.cpu_gib * (1 << 30))}
        if offload.disk_path is not None:
            tiers = [{"type": "fs", "root_dir": offload.disk_path}]
            extra |= {"spec_name": "TieringOffloadingSpec", "secondary_tiers": tiers}
        parts.append({"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra})
    elif offload.type == "mooncake":
        parts.append({"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"})
    if len(parts) < 2:
        return parts[0] if parts else {}
    joined = {"connectors": parts}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": joined}


def vllm_defaults(config: RunConfig) -> dict[str, str]:
    """What vLLM finds set when it is imported; only the first is not the user's to override."""
    return {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /update_weights and their like
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": config.logging.level.upper(),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the run shares out the cores itself, by OMP_NUM_THREADS
    }


def engine_environment(config: RunConfig, engine: EnginePlan) -> dict[str, str]:
    """Variables that are known before anything starts; `inference.env` comes last and may override."""
    inference = config.inference
    variables: dict[str, str] = {}
    if inference.deep_gemm is not None:
        variables |= dict.fromkeys(("VLLM_USE_DEEP_GEMM", "VLLM_MOE_USE_DEEP_GEMM"), str(int(inference.deep_gemm)))
    if config.weight_transport.type == "lora":
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # /v1/load_lora_adapter
    if inference.kv_offload.mooncake_config is not None:
        variables["MOONCAKE_CONFIG_PATH"] = inference.kv_offload.mooncake_config
    return variables | inference.env | own_of(config, engine.kind).env


def address_environment(role: RolePlan, endpoints: Mapping[str, str]) -> dict[str, str]:
    """Variables that name addresses: of this process for its peers, and of its NIXL side channel."""
    engine, variables = role.engine, {}
    assert engine is not None
    if engine.dp_local < engine.dp:
        variables["VLLM_HOST_IP"] = endpoints[role.name].removeprefix("http://").rsplit(":", 1)[0]
    if engine.kind != "both":
        host, port = endpoints[kv_side_channel(role.name)].rsplit(":", 1)
        variables["VLLM_NIXL_SIDE_CHANNEL_HOST"] = host
        # vLLM adds the rank among all of its engine
        variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(int(port) - engine.start_rank)
    return variables


def cpu_arguments(config: RunConfig, tp: int) -> dict[str, Any]:
    """What vLLM's own defaults get wrong on a CPU that a whole run shares.

    Compiling takes minutes; the KV cache would take most of the machine's memory; and a request with a seed whose
    prefill is cut in two ends the engine ("CPU Generator does not use offset", vLLM 0.32).
    """
    return {
        **(latent_arguments(config.model.card) if config.model.card.kv_lora_rank else {}),
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_cache_bytes(config, tp, config.inference.max_num_seqs),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(MAX_PREFILL_TOKENS, config.inference.max_model_len),
    }


def latent_arguments(card: ModelCard) -> dict[str, Any]:
    """Of latent attention on a CPU, with vLLM 0.32.

    Its rotary operator for CPUs is wrong for tensors of [tokens, heads, dim], of which it seems to take the stride of
    heads for that of tokens: log-probabilities are off by 0.02 to 0.1 from the second token on. Other families hand it
    two dimensions, for which it is right; here PyTorch's own operators take its place. And of two kernels the one for
    AMX, which vLLM prefers where it can, knows bfloat16 only and drops the weights that an update would have to fill.
    """
    arguments: dict[str, Any] = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    return arguments if expands_latents(card) else arguments | {"attention_backend": "CPU_MLA"}


def cpu_environment(config: RunConfig) -> dict[str, str]:
    """Variables that vLLM is to find set on a CPU, unless the user says otherwise."""
    return {"VLLM_MLA_DISABLE": "1"} if expands_latents(config.model.card) else {}


def to_argv(arguments: dict[str, Any]) -> list[str]:
    """A command line of `vllm serve`: true and false become --x and --no-x, objects JSON, lists several words."""
    argv: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if value is None:
            continue
        if isinstance(value, bool):
            argv.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            argv += [f"--{flag}", *(_word(item) for item in value)]
        else:
            argv.append(f"--{flag}={_word(value)}")
    return argv


def _word(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict) else str(value)
