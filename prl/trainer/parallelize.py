"""From a meta-device model to a sharded one: activation checkpointing, then FSDP2, then weights.

In the manner of torchtitan: small functions, applied in one order, each doing nothing when its knob is off.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.distributed._composable import checkpoint
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from prl.config.schema import ActivationCheckpointing, ModelCard, RunConfig
from prl.models.checkpoint import check_card, load_checkpoint
from prl.models.qwen3 import Qwen3Model
from prl.trainer.world import World


def build_model(config: RunConfig, path: Path, world: World) -> Qwen3Model:
    """The model of `config`, sharded over the world, with the weights at `path`; every rank reads only its own part."""
    check_card(path, config.model.card)
    model = build_sharded(config.model.card, config, world)
    load_checkpoint(model, path)
    return model


def build_sharded(card: ModelCard, config: RunConfig, world: World) -> Qwen3Model:
    with torch.device("meta"):
        model = Qwen3Model(card)
    apply_checkpointing(model, config.memory_recipe.ac)
    apply_fsdp(model, config, world)
    return model.to_empty(device=world.device)


def apply_checkpointing(model: Qwen3Model, ac: ActivationCheckpointing) -> None:
    """Recompute every `freq`-th layer's activations in backward (arXiv:1604.06174)."""
    if ac.mode == "none":
        return
    for index in range(0, len(model.layers), ac.freq):
        checkpoint(model.layers[index], preserve_rng_state=False)  # by hooks: parameters keep their names


def apply_fsdp(model: Qwen3Model, config: RunConfig, world: World) -> None:
    """Shard over dp_shard, replicate over dp_replicate; parameters and reductions in float32, compute in
    model.dtype.
    """
    compute = torch.bfloat16 if config.model.dtype == "bfloat16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32)
    mesh = world.mesh if world.mesh["dp_replicate"].size() > 1 else world.mesh["dp_shard"]
    reshard = config.parallelism.reshard_after_forward
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in (*model.layers, model):
        # losses are already divided by the global token count, so gradients are summed; gloo cannot pre-multiply
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
