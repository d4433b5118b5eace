"""What a job needs of the machines that it runs on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

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
    VERIFIERS,
    VLLM,
    Package,
)
from prl.config.schema import RunConfig, SlurmConfig
from prl.config.world import World, world_of
from prl.planning.planner import make_plan

HUB = ("env:", "/", "./", "../", "~")  # what names of data sets do not begin with


@dataclass(frozen=True)
class Needs:
    """`where`: whether the job runs on this machine, or on nodes that SLURM gives it."""

    where: Literal["here", "nodes"] = "here"
    packages: dict[str, str] = field(default_factory=dict)  # module -> the choice that needs it
    only_on_gpus: tuple[tuple[str, str], ...] = ()  # (choice, what to choose instead)
    device: str = "auto"
    nodes: int = 1
    gpus_per_node: int = 1  # device slots that the busiest node uses
    gpus_in_all: int = 1  # that one machine needs to pose as all nodes
    spans_nodes: bool = False
    trains: bool = True
    slurm: SlurmConfig = field(default_factory=SlurmConfig)
    port: int = 0

    @property
    def needs_gpus(self) -> bool:
        return bool(self.only_on_gpus)

    def why_gpus(self) -> str:
        return ", ".join(choice for choice, _ in self.only_on_gpus)


def needs_of(config: RunConfig, slurm: SlurmConfig, where: Literal["here", "nodes"]) -> Needs:
    """`slurm`: what the launcher asks for, with the keys of the point over it."""
    plan, world = make_plan(config), world_of(config)
    last = 1 if plan.num_nodes > 1 else plan.gpus_per_node  # as `refuse_too_few_gpus` (runtime/nodes/remote.py)
    return Needs(
        where=where,
        packages={package.module: choice for package, choice in _packages(config, world)},
        only_on_gpus=tuple(_only_on_gpus(config, world)),
        device=config.deployment.device,
        nodes=plan.num_nodes,
        gpus_per_node=plan.gpus_per_node,
        gpus_in_all=(plan.num_nodes - 1) * config.deployment.gpus_per_node + last,
        spans_nodes=plan.num_nodes > 1,
        trains=world.has_trainers,
        slurm=slurm,
        port=config.inference.port,
    )


def _packages(config: RunConfig, world: World) -> Iterator[tuple[Package, str]]:
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
    sft = config.sft or config.warm_start
    if sft is not None and not sft.data.source.startswith(HUB) and not sft.data.source.endswith(".jsonl"):
        yield DATASETS, f"sft.data.source={sft.data.source}"


def _only_on_gpus(config: RunConfig, world: World) -> Iterator[tuple[str, str]]:
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
