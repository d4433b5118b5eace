"""From a meta-device model to a sharded one: experts, adapters, compilation, checkpointing, FSDP2 (or, where one rank
holds all, its mixed precision alone), then weights.

In the manner of torchtitan: small functions, applied in one order, each doing nothing when its knob is off.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from prl.config.config_json import card_of_impl, check_card
from prl.config.errors import UserError
from prl.config.schema import ParallelismConfig, RunConfig
from prl.config.world import (
    context_style,
    expert_dimension,
    experts_go_without_fsdp,
    fsdp_units,
    goes_without_fsdp,
)
from prl.models.adapters.lora import LoraLinear, apply_lora, cast_parameters, init_adapters
from prl.models.checkpoints.reading import load_checkpoint
from prl.models.experts.all_to_all import AllToAllDispatch
from prl.models.experts.deepep import DeepEPDispatch
from prl.models.experts.hierarchical import HierarchicalDispatch
from prl.models.experts.stacked import Dispatch, Experts
from prl.models.families.build import build_decoder
from prl.models.fp8.apply import apply_fp8
from prl.models.layers.decoder import Decoder, draw
from prl.models.layers.lm_head import LMHead
from prl.models.state_space.mixer import keeps_float32
from prl.trainer.compilation import apply_compile
from prl.trainer.indexer_training import train_indexers
from prl.trainer.memory.activation_offload import apply_activation_offload
from prl.trainer.memory.recompute import apply_checkpointing
from prl.trainer.mixed_precision import compute_in
from prl.trainer.world import World, cut_at_nodes, shard_mesh


def build_model(config: RunConfig, path: Path | None, world: World) -> Decoder:
    """The model of `config`, sharded over the world; every rank reads only its own part of the weights at `path`.

    Without a path the weights are random and drawn in place, part by part (benchmarks).
    """
    if path is not None:
        check_card(path, card_of_impl(config.model))
    model = build_sharded(config, path, world)
    if path is not None:
        load_checkpoint(model, path)
    else:
        draw_weights(model, config.seed + world.dense.get_local_rank("fsdp"))  # the same on every replica
    init_adapters(model, config.seed)
    return model


def build_meta(config: RunConfig, path: Path | None) -> Decoder:
    """The model without storage: ours, or transformers' behind the same interface."""
    card = config.model.card
    if config.model.impl == "hf" or not card.is_native:
        from prl.models.families.hf_causal_lm import build_hf_model

        return build_hf_model(path, card)  # type: ignore[return-value]
    with torch.device("meta"):
        return build_decoder(card)


def build_sharded(config: RunConfig, path: Path | None, world: World) -> Decoder:
    model = build_meta(config, path)
    if config.model.indexer_loss_coef > 0:
        train_indexers(model)
    if config.model.fp8 != "none":
        apply_fp8(model, config.model.fp8)
    if world.cp > 1 and context_style(config) == "gather":
        model.leave_latents()
    apply_expert_parallelism(model, config.parallelism, world)
    if config.memory_recipe.lora.rank:
        apply_lora(model, config.memory_recipe.lora, compute_dtype(config))
        check_head(model)
    elif config.memory_recipe.optim_cpu_offload == "full":
        cast_parameters(model, compute_dtype(config), requires_grad=True)  # float32 masters live on the host
    apply_compile(model, config.memory_recipe.compile, config.memory_recipe.ac)
    apply_checkpointing(model, config.memory_recipe.ac, config.memory_recipe.compile)
    apply_activation_offload(model, config.memory_recipe.ac_offloading, world.device)
    alone = goes_without_fsdp(config, world.dense["dp_replicate"].size(), world.dense["fsdp"].size())
    if not alone:
        apply_fsdp(model, config, world)
    model.to_empty(device="cpu" if config.memory_recipe.fsdp_cpu_offload else world.device)
    move_buffers(model, world.device)
    if alone:
        compute_in(model, compute_dtype(config))
    return model


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """To where the model computes; FSDP offloads and gathers parameters alone."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def check_head(model: Decoder) -> None:
    """Raise UserError when the LM head has adapters: losses are computed from its weight alone."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear) and module.weight is model.head_weight:
            target = name.split(".")[-1]
            raise UserError(
                "The LM head cannot have adapters.",
                where=f"memory_recipe.lora.targets=[...,{target}]",
                why="losses are computed from hidden states and the LM head's weight, in chunks",
                fix=f"memory_recipe.lora.targets without {target}",
            )


@torch.no_grad()
def draw_weights(model: Decoder, seed: int, std: float = 0.02) -> None:
    """Weights as models begin, without a copy of the model anywhere; every parameter from the same seed."""
    for name, param in model.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        draw(name, local, torch.Generator(local.device).manual_seed(seed), std)
    for buffer in model.checkpoint_buffers().values():
        buffer.zero_()


def apply_expert_parallelism(model: Decoder, parallelism: ParallelismConfig, world: World) -> None:
    """Give each rank of an expert group its share of the experts, and let the tokens travel there."""
    if world.experts is None:
        return
    mesh, dispatch = world.experts["ep"], make_dispatch(parallelism, world)
    for experts in expert_modules(model):
        for name, param in list(experts.named_parameters(recurse=False)):
            experts.register_parameter(name, nn.Parameter(distribute_tensor(param.data, mesh, [Shard(0)])))
        experts.dispatch = dispatch


def make_dispatch(parallelism: ParallelismConfig, world: World) -> Dispatch:
    """Who carries the tokens of all layers. A collective of the world."""
    assert world.experts is not None
    group = world.experts["ep"].get_group()
    match parallelism.ep_comm_backend:
        case "torch":
            return AllToAllDispatch(group, parallelism.ep_pieces)
        case "hierarchical":
            nodes = cut_at_nodes(world)
            return HierarchicalDispatch(nodes.get_group("nodes"), nodes.get_group("ranks"), parallelism.ep_pieces)
        case "deepep":
            return DeepEPDispatch(group, parallelism.deepep_num_sms, parallelism.deepep_token_chunk_size)


def expert_modules(model: nn.Module) -> list[Experts]:
    return [module for module in model.modules() if isinstance(module, Experts)]


def compute_dtype(config: RunConfig) -> torch.dtype:
    return torch_dtype(config.model.dtype)


def torch_dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name == "bfloat16" else torch.float32


def apply_fsdp(model: Decoder, config: RunConfig, world: World) -> None:
    """Shard over dp_shard x cp, replicate over dp_replicate; parameters in float32, compute in model.dtype, gradients
    added up in parallelism.reduce_dtype. What states decay by is computed and added up in float32. Activations follow
    the parameters' dtype from the embedding on; nothing is cast on the way into a layer, for the rotary tables are
    float32 and long positions need them so.
    """
    options: dict[str, Any] = {"offload_policy": OffloadPolicy()}
    if config.memory_recipe.fsdp_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=world.device.type == "cuda")
    compute, reduce = compute_dtype(config), torch_dtype(config.parallelism.reduce_dtype)
    options |= {"mesh": shard_mesh(world.dense, "fsdp"), "mp_policy": precision(compute, reduce)}
    inner = options | {"reshard_after_forward": config.parallelism.reshard_after_forward}
    apart = False  # whether experts are units of their own
    if world.experts is not None:
        apart = not experts_go_without_fsdp(config, world.size, world.experts["ep"].size())
        if apart:
            shard_experts(model, world.experts, inner)
        else:
            leave_experts(model, [options, inner])
    for module in model.modules():
        if keeps_float32(module):
            fully_shard(module, **inner | {"mp_policy": precision(torch.float32, torch.float32)})
    layers, left = list(model.layers), options.get("ignored_params", set())
    sizes = [sum(param.numel() for param in layer.parameters() if param not in left) for layer in layers]
    for unit in fsdp_units(sizes, apart):
        fully_shard([layers[index] for index in unit], **inner)
    if isinstance(model, Decoder) and model.lm_head is not None:
        shard_ends(model.embed_tokens, model.lm_head, inner)
    fully_shard(model, **options, reshard_after_forward=False)
    if world.experts is not None and apart and world.experts["efsdp"].size() > 1:
        gather_ahead(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # losses are already divided by the global token count, so gradients are summed; gloo cannot pre-multiply
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def gather_ahead(model: Decoder) -> None:
    """Layer and experts each one layer before they are needed. By itself FSDP gathers experts when their layer has come
    to them, for the host, which waits for the experts' tokens in every layer, is not ahead of the device; and in
    backward, where they are a layer's first, when they are needed at once.
    """
    units: list[list[FSDPModule]] = [
        [module for module in (layer, *expert_modules(layer)) if isinstance(module, FSDPModule)]
        for layer in model.layers
    ]
    for before, after in pairwise(units):
        before[0].set_modules_to_forward_prefetch(after)
        after[0].set_modules_to_backward_prefetch(before)


def precision(compute: torch.dtype, reduce: torch.dtype) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, cast_forward_inputs=False)


def shard_ends(embedding: nn.Embedding, head: LMHead, options: dict[str, Any]) -> None:
    """Embedding and head by themselves, so that neither is whole while the layers run. Tied they cannot be: the one
    weight is needed first and last, and stays gathered with the root, as does the last norm.
    """
    fully_shard(embedding, **options).set_unshard_in_backward(False)  # its gradient does not depend on it
    fully_shard(head, **options | {"reshard_after_forward": False})  # its backward comes next


def leave_experts(model: Decoder, options: list[dict[str, Any]]) -> None:
    """Experts stay as they are, out of FSDP's `options`. Their products cast the weights."""
    left = {param for experts in expert_modules(model) for param in experts.parameters(recurse=False)}
    for of_units in options:
        of_units["ignored_params"] = left


def shard_experts(model: Decoder, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Experts under expert parallelism over what remains of the island, along a dimension that it divides. Where
    nothing remains and there are no replicas (but FSDP has other work for them: `experts_go_without_fsdp`), their
    gradients stay on their ranks, and are not rounded for travel.
    """
    ranks = mesh["efsdp"].size()
    if ranks * mesh["dp_replicate"].size() == 1:
        options = options | {"mp_policy": precision(options["mp_policy"].param_dtype, torch.float32)}
    for experts in expert_modules(model):
        fully_shard(
            experts,
            **options | {"mesh": shard_mesh(mesh, "efsdp")},
            shard_placement_fn=lambda param: Shard(expert_dimension(param.shape, ranks)),
        )
