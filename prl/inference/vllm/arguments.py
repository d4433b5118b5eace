"""RunConfig -> the arguments of vLLM's server. Imports nothing of vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prl.config.schema import RunConfig
from prl.inference.vllm.plugin import BACKEND
from prl.inference.vllm.versions import is_old

CPU_BLOCK_TOKENS = 128  # vLLM's KV block on CPUs
COLOCATED_MEMORY = 0.5  # of the GPU, for an engine that shares it with a trainer; inference.vllm may say otherwise
MAX_PREFILL_TOKENS = 8192  # per step, as in the built-in engine


def server_arguments(config: RunConfig, model_path: Path, on_cpu: bool) -> dict[str, Any]:
    """Engine and server arguments under vLLM's names; `inference.vllm` comes last and may add or override.

    model_path: the checkpoint directory of the initial weights.
    """
    inference, model = config.inference, config.model
    arguments: dict[str, Any] = {
        "model": str(model_path),
        "served_model_name": [model.name],
        "dtype": model.dtype if inference.dtype == "auto" else inference.dtype,
        "seed": config.seed,
        "max_num_seqs": inference.max_num_seqs,
        "max_model_len": inference.max_model_len,
        "enable_prefix_caching": inference.prefix_caching,
        "enable_return_routed_experts": inference.return_routed_experts,
        "tensor_parallel_size": inference.tp,
        "data_parallel_size": inference.dp,
        "logprobs_mode": "processed_logprobs",  # of the distribution sampled from, which the loss needs
        "weight_transfer_config": {"backend": BACKEND},
        "enable_server_load_tracking": True,  # /load
        "disable_uvicorn_access_log": True,
    }
    if not is_old():
        arguments["enable_scale_out"] = True  # /inference/v1/generate, which 0.23 always serves
    if model.tokenizer not in (None, "byte"):
        arguments["tokenizer"] = model.tokenizer
    if config.deployment.type == "colocated" and not on_cpu:
        arguments |= {"enable_sleep_mode": inference.sleep_level > 0, "gpu_memory_utilization": COLOCATED_MEMORY}
    return arguments | (cpu_arguments(config) if on_cpu else {}) | inference.vllm


def cpu_arguments(config: RunConfig) -> dict[str, Any]:
    """What vLLM's own defaults get wrong on a CPU that a whole run shares.

    Compiling takes minutes; the KV cache would take most of the machine's memory; and a request with a seed whose
    prefill is cut in two ends the engine ("CPU Generator does not use offset", vLLM 0.32).
    """
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_cache_bytes(config),
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(MAX_PREFILL_TOKENS, config.inference.max_model_len),
    }


def kv_cache_bytes(config: RunConfig) -> int:
    """Bytes with which max_num_seqs sequences of max_model_len fit one engine of tp ranks, whole blocks each."""
    inference, card = config.inference, config.model.card
    name = config.model.dtype if inference.dtype == "auto" else inference.dtype
    blocks = inference.max_num_seqs * -(-inference.max_model_len // CPU_BLOCK_TOKENS) + 1  # one is vLLM's null block
    heads = -(-card.num_key_value_heads // inference.tp)
    token_bytes = 2 * card.num_hidden_layers * heads * card.head_dim * (4 if name == "float32" else 2)
    return blocks * CPU_BLOCK_TOKENS * token_bytes


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
