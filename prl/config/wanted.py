"""What choices want of the machines that they run on: packages, and GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from prl.config.hub import is_hub_data
from prl.config.packages import (
    DATASETS,
    DEEP_EP,
    DEEP_GEMM,
    FLASH_ATTENTION_3,
    FLASH_ATTENTION_4,
    MATH_VERIFY,
    MOONCAKE,
    NIXL,
    ROUTER,
    TRL,
    VERIFIERS,
    VLLM,
    Package,
)
from prl.config.schema import RunConfig
from prl.config.world import World


def wanted_packages(config: RunConfig, world: World) -> Iterator[tuple[Package, str]]:
    """Packages that prl does not bring, each with the choice that needs it."""
    model, inference = config.model, config.inference
    if world.has_trainers:
        if model.attn == "flash_attention_4":
            yield FLASH_ATTENTION_4, "model.attn=flash_attention_4"
        if model.attn == "flash_attention_3":
            yield FLASH_ATTENTION_3, "model.attn=flash_attention_3"
        if model.fp8 == "deep_gemm":
            yield DEEP_GEMM, "model.fp8=deep_gemm"
        if config.parallelism.ep_comm_backend == "deepep":
            yield DEEP_EP, "parallelism.ep_comm_backend=deepep"
    if world.has_engines:
        if inference.engine == "vllm":
            yield VLLM, "inference.engine=vllm"
        for backend in (inference.all2all_backend, inference.pd.prefill.all2all_backend,
                        inference.pd.decode.all2all_backend):  # fmt: skip
            if backend is not None and backend.startswith("deepep"):
                yield DEEP_EP, f"all2all_backend={backend}"
        if inference.deep_gemm:
            yield DEEP_GEMM, "inference.deep_gemm=true"
        if inference.pd.num_prefill_gpus:
            yield NIXL, "inference.pd.num_prefill_gpus"
        if inference.router.type == "vllm_router":
            yield ROUTER, "inference.router.type=vllm_router"
        if inference.kv_offload.type == "mooncake":
            yield MOONCAKE, "inference.kv_offload.type=mooncake"
    yield from _data_packages(config)


def _data_packages(config: RunConfig) -> Iterator[tuple[Package, str]]:
    ids = {source.id for source in config.env.mix.values()} if config.job in ("rl", "eval") else set()
    if "hf_math" in ids:
        yield DATASETS, "env=hf_math"
        yield MATH_VERIFY, "env=hf_math"
    if "verifiers" in ids:
        yield VERIFIERS, "env=verifiers"
    if config.bench is not None and config.bench.target == "trl":
        yield TRL, "bench.target=trl"
    sft = config.sft or config.warm_start
    if sft is not None and is_hub_data(sft.data.source):
        yield DATASETS, f"sft.data.source={sft.data.source}"


def only_on_gpus(config: RunConfig, world: World) -> Iterator[tuple[str, str]]:
    """Choices that need GPUs, each with what to choose instead."""
    model, inference = config.model, config.inference
    if config.deployment.device == "cuda":
        yield "deployment.device=cuda", "deployment.device=auto"
    if world.has_trainers:
        if model.attn.startswith("flash_attention"):
            yield f"model.attn={model.attn}", "model.attn=auto"
        if model.fp8 == "deep_gemm":
            yield "model.fp8=deep_gemm", "model.fp8=none"
        if config.parallelism.ep_comm_backend == "deepep":
            yield "parallelism.ep_comm_backend=deepep", "parallelism.ep_comm_backend=torch"
    if config.job == "rl" and config.weight_transport.type in ("nccl", "ipc"):
        yield f"weight_transport={config.weight_transport.type}", "weight_transport=filesystem"
    if world.has_engines and inference.engine == "vllm" and inference.return_routed_experts:
        yield "inference.return_routed_experts=true", "inference.return_routed_experts=false"
