"""FP8 for a whole model."""

from __future__ import annotations

from torch import nn

from prl.models.experts.stacked import Experts
from prl.models.fp8.dense import Fp8DenseMLP
from prl.models.fp8.experts import Fp8Experts
from prl.models.fp8.gemm import Backend, deep_gemm
from prl.models.fp8.linears import KEPT, Fp8Attention, Fp8Linear
from prl.models.layers.attention import Attention
from prl.models.layers.mlp import DenseMLP


def apply_fp8(model: nn.Module, backend: Backend) -> None:
    """Have all linears and experts of a model multiply in FP8. Before compilation, checkpointing and sharding.

    Raises UserError when DeepGEMM is asked for and cannot run here.
    """
    if backend == "deep_gemm":
        deep_gemm()
    for module in list(model.modules()):
        if isinstance(module, Experts):
            module.__class__ = Fp8Experts
            assert isinstance(module, Fp8Experts)
            module.backend = backend
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name not in KEPT:
                setattr(module, name, Fp8Linear(child, backend))
        if isinstance(module, Attention):
            module.__class__ = Fp8Attention
        elif type(module) is DenseMLP:
            module.__class__ = Fp8DenseMLP
