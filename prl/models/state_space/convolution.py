"""The short causal convolution before a state-space recurrence: each channel over its last few tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [R, K - 1 + T, C], weight [C, K], bias [C] -> [R, T, C], SiLU of the convolution.

    Row t of what comes out saw rows t to t + K - 1 of x: the first K - 1 are what came before, zeros at a start.
    """
    return F.silu(F.conv1d(x.mT, weight[:, None], bias, groups=len(weight))).mT


class Documents:
    """Where packed documents lie: of their N tokens on the device."""

    def __init__(self, doc_lens: list[int], device: torch.device) -> None:
        lengths = torch.tensor(doc_lens)
        starts = lengths.cumsum(0) - lengths
        self.count = len(doc_lens)
        self.number = torch.arange(self.count).repeat_interleave(lengths).to(device)  # [N] int64: which document
        self.first = starts.repeat_interleave(lengths).to(device, torch.int32)  # [N]: where it begins
        self.is_first = torch.zeros(int(lengths.sum()), dtype=torch.bool).index_fill(0, starts, True).to(device)


def convolve_documents(x: Tensor, weight: Tensor, bias: Tensor, documents: Documents) -> Tensor:
    """x [N, C] of packed documents, each of which begins with zeros before it -> [N, C], as `convolve`."""
    if x.is_cuda and x.dtype in (torch.bfloat16, torch.float16) and x.stride(1) == 1:
        return _Kernels.apply(x, weight, bias, documents.first)
    width = weight.shape[1] - 1
    places = torch.arange(len(x), device=x.device) + (documents.number + 1) * width
    spaced = x.new_zeros(len(x) + documents.count * width, x.shape[1]).index_copy(0, places, x)
    return convolve(spaced[None], weight, bias)[0].index_select(0, places - width)


class _Kernels(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, first: Tensor) -> Tensor:
        from prl.models.state_space.convolution_kernels import forward

        weight = weight.contiguous()
        ctx.save_for_backward(x, weight, bias, first)
        return forward(x, weight, bias, first)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from prl.models.state_space.convolution_kernels import backward

        return (*backward(grads[0].contiguous(), *ctx.saved_tensors), None)
