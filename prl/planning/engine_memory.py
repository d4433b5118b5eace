"""Memory of engines: their KV caches, and their part of a GPU that they share with a trainer."""

from __future__ import annotations

from prl.config.engines import vllm_arguments_of
from prl.config.schema import ModelCard, RunConfig
from prl.config.world import takes_turns, world_of
from prl.planning.model_size import expert_parameters, parameter_count

COLOCATED_PART = 0.5  # of the GPU, for an engine that shares it with a trainer; inference.vllm may say otherwise
WORKING_PART = 0.1  # of the GPU, for what an engine has beside weights and KV cache: activations, CUDA graphs
CPU_BLOCK_TOKENS = 128  # vLLM's KV block on CPUs; on GPUs 16, or a few times as many
CPU_LATENT = (512, 64)  # numbers of a token, turned ones apart, that its latent attention on CPUs is compiled for
# arguments of vLLM with which the size of the cache is said, or is not ours to say
SIZED_BY = {"kv_cache_memory_bytes", "num_gpu_blocks_override", "speculative_config", "kv_transfer_config"}


def engine_share(config: RunConfig) -> float:
    """Part of a GPU that an engine takes which shares it with a trainer; of the built-in one nobody says, so all."""
    if (part := config.deployment.infer_memory_fraction) is not None:
        return part
    if config.inference.engine != "vllm":
        return 1.0
    return float(config.inference.vllm.get("gpu_memory_utilization", COLOCATED_PART))


def bytes_when_awake(config: RunConfig, gpu_bytes: int) -> int:
    """That an engine may take of a GPU of so many when it wakes beside a trainer."""
    inference, card = config.inference, config.model.card
    if inference.engine == "vllm":
        cache = bounded_cache_bytes(config, gpu_bytes)
    else:  # its cache has a row of max_model_len for each sequence
        rows = len(card.attention_layers) * inference.max_num_seqs * inference.max_model_len
        cache = None if card.state_layers else rows * card.cached_per_token * number_bytes(config)
    return int(engine_share(config) * gpu_bytes) if cache is None else _beside_cache(config, gpu_bytes) + cache


def bounded_cache_bytes(config: RunConfig, gpu_bytes: int) -> int | None:
    """Bytes of the KV cache on each GPU of so many, of an engine of vLLM that sleeps while the trainer works: room for
    all sequences that there may be at once. None: as large as the engine's share of the GPU, as vLLM has it, where that
    is less, or where the cache holds something else than keys and values.

    An engine that wakes has its whole cache mapped anew, on an H200 14 GiB in 15 ms and 68 in 140 (what a process
    leaves behind is cleared before another one gets it), and nothing that lies in it outlasts the sleep.
    """
    inference, card, world = config.inference, config.model.card, world_of(config)
    plain = card.is_native and not card.kv_lora_rank and not card.state_layers
    sleeps = inference.engine == "vllm" and inference.sleep_level > 0 and takes_turns(config) and world.has_trainers
    whole = not inference.pd.num_prefill_gpus and inference.kv_offload.type == "none"
    if not (plain and sleeps and whole) or SIZED_BY & set(vllm_arguments_of(config, "both")):
        return None
    copies = max(1, world.infer_devices // inference.tp)
    alive = max(inference.max_num_seqs, -(-inference.max_concurrent_rollouts // copies))  # between two turns, too
    cache = kv_cache_bytes(config, inference.tp, alive)
    fits = _beside_cache(config, gpu_bytes) + cache < engine_share(config) * gpu_bytes
    return cache if fits else None


def _beside_cache(config: RunConfig, gpu_bytes: int) -> int:
    inference, card = config.inference, config.model.card
    experts = expert_parameters(card)
    wide = inference.tp * (inference.dp if inference.expert_parallel else 1)
    held = (parameter_count(card) - experts) / inference.tp + experts / wide
    return int(held * number_bytes(config) + WORKING_PART * gpu_bytes)


def kv_cache_bytes(config: RunConfig, tp: int, sequences: int) -> int:
    """Bytes with which so many sequences of max_model_len fit one of tp ranks, whole blocks each."""
    inference, card = config.inference, config.model.card
    blocks = sequences * -(-inference.max_model_len // CPU_BLOCK_TOKENS) + 1  # one is vLLM's null block
    expanded = expands_latents(card)  # values are as wide as keys then
    numbers = 2 * card.num_attention_heads * card.head_dim if expanded else card.cached_per_token
    heads = card.num_attention_heads if expanded else card.num_key_value_heads
    shared = 1 if card.kv_lora_rank and not expanded else min(tp, heads)  # each rank has the whole latent
    token_bytes = len(card.attention_layers) * -(-numbers // shared) * number_bytes(config)
    return blocks * CPU_BLOCK_TOKENS * token_bytes


def number_bytes(config: RunConfig) -> int:
    """Of a weight or a cached number, in an engine that does not quantise."""
    name = config.model.dtype if config.inference.dtype == "auto" else config.inference.dtype
    return 4 if name == "float32" else 2


def expands_latents(card: ModelCard) -> bool:
    """Whether vLLM on a CPU keeps keys and values of every head: its latent attention there is for one size."""
    return bool(card.kv_lora_rank) and (card.kv_lora_rank, card.qk_rope_head_dim) != CPU_LATENT
