"""What vLLM 0.32's layerwise reload leaves stale on CPUs, where weights are packed when they are first loaded.

* Unquantised experts: `UnquantizedFusedMoEMethod._setup_kernel` packs them only while it has no kernel yet, so a reload
  puts unpacked numbers where the kernel expects packed ones.
* A head tied to the embedding: the reload processes one of the two (the second limitation that the docstring of
  vllm.model_executor.model_loader.reload names), and the head goes on with its packed copy of the old weights.

Such defects are collected upstream in https://github.com/vllm-project/vllm/issues/48312. tests/test_vllm.py compares
logprobs after an update with the trainer's, and fails without either function.
"""

from __future__ import annotations

from torch import nn
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def forget_kernels(model: nn.Module) -> None:
    """Before a reload: have experts packed again, as at the first load."""
    for module in model.modules():
        if isinstance(method := getattr(module, "quant_method", None), UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def pack_heads(model: nn.Module) -> None:
    """After a reload: pack the output head anew."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
