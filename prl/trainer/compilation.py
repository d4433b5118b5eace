"""torch.compile for the parts of a layer that run neither an attention kernel nor communication.

Compiling those parts rather than whole layers keeps attention (which chooses kernels by document length), the tokens'
way to their experts and FSDP's hooks out of the graphs, so nothing breaks them and all layers share one compiled code.
Inductor fuses norms, rotary embedding, activations and residuals, and recomputes what is cheap in backward, which is
where both the speed and the memory come from.
"""

from __future__ import annotations

import torch

from prl.models.qwen3 import DecoderLayer, Qwen3Model, SparseMLP


def apply_compile(model: Qwen3Model, enabled: bool) -> None:
    """Replace methods of each layer by compiled ones; before activation checkpointing wraps them."""
    if not enabled:
        return
    for layer in model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.project = torch.compile(layer.project)  # type: ignore[method-assign]
        layer.join = torch.compile(layer.join)  # type: ignore[method-assign]
        if isinstance(layer.mlp, SparseMLP):
            layer.mlp.route = torch.compile(layer.mlp.route)  # type: ignore[method-assign]
            experts = layer.mlp.experts
            experts.activate = torch.compile(experts.activate)  # type: ignore[method-assign]
        else:
            layer.mlp_block = torch.compile(layer.mlp_block)  # type: ignore[method-assign]
