"""cuDNN's attention over one causal document: as a differentiable call, and as forward and backward by themselves."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

LONG_DOCUMENT = 2048  # tokens from which cuDNN, one call per document, beats one varlen call
CUDNN_GRAIN = 256  # lengths are rounded up to multiples of this: cuDNN builds a plan for every new shape


@functools.cache
def prefers_cudnn(device: torch.device) -> bool:
    """Whether cuDNN's attention beats the built-in flash kernels: on Hopper by 1.7 to 2 times (prl/README.md)."""
    return torch.cuda.get_device_capability(device)[0] == 9 and torch.backends.cudnn.is_available()


def rounded(length: int) -> int:
    """Tokens of the slice in which a document of `length` is attended to."""
    return -(-length // CUDNN_GRAIN) * CUDNN_GRAIN


def slice_rows(x: Tensor, first: int, size: int) -> Tensor:
    """x[first : first + size], with zeros for rows beyond the end."""
    rows = x[first : first + size]
    return F.pad(rows, (0, 0, 0, 0, 0, size - rows.shape[0])) if rows.shape[0] < size else rows


def cudnn_attention(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention over the whole slice: q [S, Hq, D], k [S, Hkv, D], v [S, Hkv, V] -> [S, Hq, V]."""
    q, k, v = _heads_first(*(x.unsqueeze(0) for x in (q, k, v)))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)


class Kept(NamedTuple):
    """What backward wants of forward beside its arguments and its result, as PyTorch's operator gives it."""

    lse: Tensor
    others: tuple[Any, ...]


def cudnn_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Kept]:
    """Causal attention over each slice: q [B, S, Hq, D], k [B, S, Hkv, D], v [B, S, Hkv, V] -> [B, S, Hq, V]. No
    autograd.
    """
    out, lse, *others, _ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *_heads_first(q, k, v), None, True, 0.0, True, False
    )
    return out.transpose(1, 2), Kept(lse, tuple(others))


def cudnn_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: Kept
) -> tuple[Tensor, Tensor, Tensor]:
    """-> gradients of q, k and v, all of the shapes of `cudnn_forward`."""
    cu_q, cu_k, max_q, max_k, seed, offset = kept.others
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *_heads_first(dout, q, k, v, out), kept.lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0, True
    )
    dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
    return dq, dk, dv


def _heads_first(*slices: Tensor) -> list[Tensor]:
    """[B, S, H, D] -> [B, H, S, D], a view."""
    return [x.transpose(1, 2) for x in slices]
