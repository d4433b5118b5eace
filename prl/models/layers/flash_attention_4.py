"""FlashAttention 4's kernels under the names and results that PyTorch's registry expects of a module.

PyTorch 2.11 to 2.13 take two results from `_flash_attn_fwd`; flash-attn-4 has returned more since 4.0.0b20. Importing
this raises what importing flash_attn.cute.interface does where that is not installed.
"""

from __future__ import annotations

from typing import Any

from flash_attn.cute import interface
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._fa4 import register_flash_attention_fa4


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """-> output, log-sum-exp."""
    out, lse, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, lse


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of queries, keys and values."""
    dq, dk, dv, *_ = interface._flash_attn_bwd(*args, **kwargs)
    return dq, dk, dv


def activate() -> None:
    """Have PyTorch's flash attention run these. Raises RuntimeError where a kernel is not there."""
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        if not hasattr(interface, name):
            raise RuntimeError(f"{interface.__name__} has no {name}")
    register_flash_attention_impl("FA4", register_fn=lambda: register_flash_attention_fa4(__name__))
    activate_flash_attention_impl("FA4")
