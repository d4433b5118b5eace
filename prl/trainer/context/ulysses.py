"""Context parallelism by exchanging tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509).

Each rank owns a contiguous equal part of the row, padded at its end to a multiple of cp. One all-to-all gives it all
tokens of Hq / cp query heads and of the key and value heads that these read; ordinary packed attention follows; a
second one brings the outputs back. State-space layers do the same with their heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prl.models.layers.attention import Attend
from prl.models.layers.packed_attention import AttentionImpl, packed_attention
from prl.models.layers.shared_prefixes import SharedPrefixes
from prl.models.state_space.documents import mix_documents
from prl.models.state_space.mixer import Channels, Convolve, Mix
from prl.trainer.context.group import ContextGroup, exchange


def chunk_positions(tokens: int, context: ContextGroup) -> tuple[Tensor, Tensor]:
    """Row position [n] and validity [n] of this rank's slots."""
    n = -(-tokens // context.size)
    position = torch.arange(n) + context.rank * n
    return position.clamp(max=tokens - 1), position < tokens


def _padded(doc_lens: list[int], context: ContextGroup) -> list[int]:
    """The padding extends the last document, whose own tokens come before it."""
    return [*doc_lens[:-1], doc_lens[-1] + -sum(doc_lens) % context.size]


def ulysses_attention(
    doc_lens: list[int],
    context: ContextGroup,
    device: torch.device,
    impl: AttentionImpl = "auto",
    prefixes: SharedPrefixes | None = None,
) -> Attend:
    """Causal attention inside each document over this rank's slots. cp must divide the number of query heads.

    Where cp does not divide the key and value heads, each is repeated to their least common multiple.
    """
    if prefixes is None:
        attend_row = packed_attention(_padded(doc_lens, context), device, impl)
    else:
        longer = prefixes.padded(-len(prefixes.run) % context.size)
        attend_row = packed_attention(longer.doc_lens, device, impl, longer)

    def attend(layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cp, (n, heads, _) = context.size, q.shape
        repeats = cp // math.gcd(cp, k.shape[1])
        if repeats > 1:
            k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        # the heads of rank i, [n, h * D] of q, k and v side by side, are parts[i]
        shares = [t.reshape(n, cp, -1) for t in (q, k, v)]
        parts = torch.cat([share.transpose(0, 1) for share in shares], dim=2)
        row = exchange(parts, context).flatten(0, 1)  # [cp * n, h * D]: rank i sent tokens i * n onwards
        columns = row.split([share.shape[2] for share in shares], dim=1)
        q, k, v = (part.unflatten(1, (-1, t.shape[2])) for part, t in zip(columns, (q, k, v), strict=True))
        out = attend_row(layer_idx, q, k, v)
        back = exchange(out.view(cp, n, -1, out.shape[2]), context)  # [cp, n, Hq / cp, V]: rank i sent its heads
        return back.transpose(0, 1).reshape(n, heads, -1)

    return attend


def ulysses_states(doc_lens: list[int], context: ContextGroup, device: torch.device) -> Mix:
    """Convolution and recurrence along each document over this rank's slots. cp must divide the number of heads.

    Where cp does not divide the groups, B and C of each are repeated, as keys and values are above. The convolution
    runs on what was exchanged, for it sees the tokens before. Weights of other ranks' heads get no gradient here.
    """
    mix_row = mix_documents(_padded(doc_lens, context), device)

    def mix(layer_idx: int, xbc: Tensor, dt: Tensor, channels: Channels, convolve: Convolve) -> Tensor:
        cp, n = context.size, len(xbc)
        repeats = cp // math.gcd(cp, channels.groups)
        row = exchange(channels.shares(xbc, cp, repeats), context).flatten(0, 1)  # [cp * n, C']
        steps = exchange(dt.view(n, cp, -1).transpose(0, 1), context).flatten(0, 1)  # [cp * n, heads / cp], float32
        y = mix_row(layer_idx, row, steps, channels.share(context.rank, cp, repeats), convolve)
        return exchange(y.view(cp, n, -1), context).transpose(0, 1).reshape(n, -1)

    return mix
