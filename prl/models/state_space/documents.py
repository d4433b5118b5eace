"""The recurrence over packed documents, for the trainer."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from prl.models.state_space.convolution import convolve_documents, gaps
from prl.models.state_space.mixer import Channels, Mix
from prl.models.state_space.scan import scan


def mix_documents(doc_lens: list[int], device: torch.device) -> Mix:
    """Convolution and state begin anew with each document; doc_lens sum to N tokens."""
    lengths = torch.tensor(doc_lens)
    starts = torch.zeros(1, sum(doc_lens), dtype=torch.bool)
    starts[0, lengths.cumsum(0) - lengths] = True
    starts = starts.to(device)
    places = functools.cache(lambda width: gaps(doc_lens, width, device))

    def mix(layer_idx: int, xbc: Tensor, dt: Tensor, channels: Channels) -> Tensor:
        width = channels.conv.shape[1] - 1
        mixed = convolve_documents(xbc, channels.conv, channels.conv_bias, places(width), len(doc_lens))
        x, b, c = channels.cut(mixed[None])
        y, _ = scan(x, dt[None], channels.a, b, c, channels.d, starts)
        return y[0].flatten(1)

    return mix
