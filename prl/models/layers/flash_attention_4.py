"""FlashAttention 4's kernels under the names and results that PyTorch's registry expects of a module.

PyTorch 2.11 to 2.13 take two results from `_flash_attn_fwd`; flash-attn-4 has returned more since 4.0.0b20. Importing
this raises what importing flash_attn.cute.interface does where that is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from flash_attn.cute import interface
from torch import Tensor
from torch.nn.attention import activate_flash_attention_impl, register_flash_attention_impl
from torch.nn.attention._fa4 import register_flash_attention_fa4

from prl.config.errors import UserError
from prl.config.packages import FLASH_ATTENTION_4

COMPANIONS = ("flash-attn-4", "nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")  # that compile its kernels


def _flash_attn_fwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """-> output, log-sum-exp."""
    with misfits_told():
        out, lse, *_ = interface._flash_attn_fwd(*args, **kwargs)
    return out, lse


def _flash_attn_bwd(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of queries, keys and values."""
    with misfits_told():
        dq, dk, dv, *_ = interface._flash_attn_bwd(*args, **kwargs)
    return dq, dk, dv


def activate() -> None:
    """Have PyTorch's flash attention run these. Raises RuntimeError where a kernel is not there."""
    for name in ("_flash_attn_fwd", "_flash_attn_bwd"):
        if not hasattr(interface, name):
            raise RuntimeError(f"{interface.__name__} has no {name}")
    register_flash_attention_impl("FA4", register_fn=lambda: register_flash_attention_fa4(__name__))
    activate_flash_attention_impl("FA4")


@contextlib.contextmanager
def misfits_told() -> Iterator[None]:
    """Packages that do not fit show when a kernel is compiled, at its first call: UserError with their versions."""
    try:
        yield
    except (AttributeError, ImportError, TypeError) as error:
        found = ", ".join(f"{name} {_version(name)}" for name in COMPANIONS)
        raise UserError(
            f"FlashAttention 4 cannot compile its kernels: {type(error).__name__}: {error}",
            where="model.attn=flash_attention_4",
            why=f"these versions do not fit each other: {found}",
            fix=f"{FLASH_ATTENTION_4.install} (with vLLM older than 0.32 in another environment), or model.attn=auto",
        ) from error


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"
