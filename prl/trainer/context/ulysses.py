"""Context parallelism by exchanging tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Each rank owns a contiguous equal part of the row, padded at its end to a multiple of cp. One all-to-all gives it all
tokens of Hq / cp query heads and of the key and value heads that these read; ordinary packed attention follows; a
second one brings the outputs back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.models.layers.attention import Attend
from prl.models.layers.packed_attention import AttentionImpl, packed_attention
from prl.trainer.context.group import ContextGroup, exchange


def chunk_positions(tokens: int, context: ContextGroup) -> tuple[Tensor, Tensor]:
    """Row position [n] and validity [n] of this rank's slots."""
    n = -(-tokens // context.size)
    position = torch.arange(n) + context.rank * n
    return position.clamp(max=tokens - 1), position < tokens


def ulysses_attention(
    doc_lens: list[int], context: ContextGroup, device: torch.device, impl: AttentionImpl = "auto"
) -> Attend:
    """Causal attention inside each document over this rank's slots. cp must divide the number of query heads.

    Where cp does not divide the key and value heads, each is repeated to their least common multiple.
    """
    padding = -sum(doc_lens) % context.size
    # the padding extends the last document, whose own queries come before it
    attend_row = packed_attention([*doc_lens[:-1], doc_lens[-1] + padding], device, impl)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cp, (n, heads, dim) = context.size, q.shape
        repeats = cp // math.gcd(cp, k.shape[1])
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        # the heads of rank i, [n, h, D], are parts[i]
        parts = torch.cat([t.view(n, cp, -1, dim).transpose(0, 1) for t in (q, k, v)], dim=2)
        row = exchange(parts, context).flatten(0, 1)  # [cp * n, h, D]: rank i sent tokens i * n onwards
        q, k, v = row.split([t.shape[1] // cp for t in (q, k, v)], dim=1)
        out = attend_row(layer_idx, q, k, v)
        back = exchange(out.view(cp, n, -1, dim), context)  # [cp, n, Hq / cp, D]: rank i sent its heads
        return back.transpose(0, 1).reshape(n, heads, dim)

    return attend
