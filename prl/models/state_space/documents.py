"""The recurrence over packed documents, for the trainer."""

from __future__ import annotations

import torch
from torch import Tensor

from prl.models.state_space.convolution import Documents
from prl.models.state_space.mixer import Channels, Convolve, Mix
from prl.models.state_space.scan import scan


def mix_documents(doc_lens: list[int], device: torch.device) -> Mix:
    """Convolution and state begin anew with each document; doc_lens sum to N tokens."""
    documents = Documents(doc_lens, device)

    def mix(layer_idx: int, xbc: Tensor, dt: Tensor, channels: Channels, convolve: Convolve) -> Tensor:
        x, b, c = channels.cut(convolve(xbc, channels.conv, channels.conv_bias, documents)[None])
        y, _ = scan(x, dt[None], channels.a, b, c, channels.d, documents.is_first[None])
        return y[0].flatten(1)

    return mix
