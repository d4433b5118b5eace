"""The short causal convolution before a state-space recurrence: each channel over its last few tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [R, K - 1 + T, C], weight [C, K], bias [C] -> [R, T, C], SiLU of the convolution.

    Row t of what comes out saw rows t to t + K - 1 of x: the first K - 1 are what came before, zeros at a start.
    """
    return F.silu(F.conv1d(x.mT, weight[:, None], bias, groups=len(weight))).mT


def gaps(doc_lens: list[int], width: int, device: torch.device) -> Tensor:
    """[N] int64: where tokens of packed documents lie, when `width` free places come before each document."""
    lengths = torch.tensor(doc_lens)
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    return (torch.arange(len(document)) + (document + 1) * width).to(device)


def convolve_documents(x: Tensor, weight: Tensor, bias: Tensor, places: Tensor, documents: int) -> Tensor:
    """x [N, C] of packed documents, each of which begins with zeros before it -> [N, C]. places: `gaps` of K - 1."""
    width = weight.shape[1] - 1
    spaced = x.new_zeros(len(x) + documents * width, x.shape[1]).index_copy(0, places, x)
    return convolve(spaced[None], weight, bias)[0].index_select(0, places - width)
