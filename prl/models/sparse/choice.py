"""Which keys a query attends to: the best by the indexer's scores (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    I[t, s] = sum over index heads h of w[t, h] * relu(q[t, h] . k[s])

Every query has its own stretch of keys, [low, high): the document's beginning and one behind its own position, or a
sequence's place in a cache. The result lists keys in the order of their places; of equal scores the earlier key wins.
No gradient passes through the choice.
"""

from __future__ import annotations

import torch
from torch import Tensor

FEWEST = 64  # keys, as many as blocks of the kernels have
SCORES_BYTES = 256 << 20  # of one block of scores, float32: queries are taken in blocks, so that none is quadratic


def width_of(count: int, longest: int) -> int:
    """Of a choice of `count` keys among `longest` at most: no column that stays empty in every row costs anything, but
    for those up to a power of two, for kernels are built for each width.
    """
    return min(count, max(FEWEST, 1 << (longest - 1).bit_length()))


@torch.no_grad()
def choose_keys(q: Tensor, weights: Tensor, k: Tensor, low: Tensor, high: Tensor, count: int, longest: int) -> Tensor:
    """q [N, J, D], weights [N, J], k [S, D], low and high [N] -> [N, `width_of(count, longest)`] int32: rows of k, then
    -1.

    Args:
        longest: no query sees more keys. Where that is no more than `count`, it attends to all of them, unscored.

    Every query sees a key at least; without kernels, ValueError for one that sees none.
    """
    low, high, count = low.to(torch.int32), high.to(torch.int32), width_of(count, longest)
    dim = q.shape[2]  # Triton's blocks are powers of two, 16 at least
    runs_kernels = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and dim >= 16 and dim & (dim - 1) == 0
    if not runs_kernels and len(q):
        longest = int((high - low).max())  # of these queries
        if int((high - low).min()) < 1:
            raise ValueError("a query sees no key")
    if longest <= count or not len(q):
        columns = torch.arange(count, dtype=torch.int32, device=q.device)
        return torch.where(columns < (high - low)[:, None], low[:, None] + columns, -1)
    if runs_kernels:
        from prl.models.sparse.choice_kernels import choose

        return choose(q, weights.float(), k, low, high, count, SCORES_BYTES)
    return _choose_plainly(q, weights, k, low, high, count)


def _choose_plainly(q: Tensor, weights: Tensor, k: Tensor, low: Tensor, high: Tensor, count: int) -> Tensor:
    """One query at least sees more than `count` keys."""
    chosen = torch.empty(len(q), count, dtype=torch.int32, device=q.device)
    lengths = high - low
    longest = int(lengths.max())
    columns = torch.arange(longest, device=q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    size = max(1, SCORES_BYTES // 8 // (longest * (k.shape[1] + q.shape[1]) * wide.itemsize))
    for first in range(0, len(q), size):
        part = slice(first, first + size)
        seen = columns < lengths[part, None]  # [B, L]
        places = (low[part, None] + columns).clamp(max=len(k) - 1)
        scores = (q[part].to(wide) @ k[places].to(wide).transpose(1, 2)).relu_()  # [B, J, L]
        scores = (weights[part, None].to(wide) @ scores).squeeze(1).masked_fill_(~seen, float("-inf"))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        best = best.where(best < lengths[part, None], longest).sort(dim=-1).values  # what nobody may see comes last
        chosen[part] = torch.where(best < longest, low[part, None] + best, -1).to(torch.int32)
    return chosen
