"""The LM head under truncated sampling: logits of tokens that could not be drawn count for nothing.

They become a large negative number, not minus infinity: its probability is 0 all the same, and 0 times it is 0, so that
mean, entropy and gradients of the head's formulas and kernels stay free of NaN. bfloat16 has it, too, for its range is
that of float32, and neither a division by a temperature nor a sum over a vocabulary takes it beyond that range.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.models.device import to_device
from prl.transport.kept import KeptTokens

IMPOSSIBLE = -1e20


@dataclass(frozen=True)
class KeptSets:
    """The vocabulary entries from which each of M tokens was drawn, on the device; sizes are the host's."""

    counts: np.ndarray  # [M] on the host; 0: all entries
    rows: Tensor  # [K] int64, to which of the M tokens an entry belongs, ascending
    ids: Tensor  # [K] int64

    @classmethod
    def build(cls, kept: KeptTokens, device: torch.device) -> KeptSets:
        rows = np.repeat(np.arange(len(kept)), kept.counts)
        return cls(kept.counts, to_device(rows, device), to_device(kept.ids.astype(np.int64), device))

    def split(self, size: int) -> Iterator[KeptSets]:
        """Of `size` tokens each; the host does not wait for the device."""
        ends = np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])
        for first in range(0, len(self.counts), size):
            last = min(first + size, len(self.counts))
            entries = slice(int(ends[first]), int(ends[last]))
            yield KeptSets(self.counts[first:last], self.rows[entries] - first, self.ids[entries])

    def dropped(self, vocab: int) -> Tensor:
        """[M, V] bool: the entries that could not be drawn."""
        mask = torch.ones(len(self.counts), vocab, dtype=torch.bool, device=self.ids.device)
        mask[self.rows, self.ids] = False
        whole = np.flatnonzero(self.counts == 0)
        if len(whole):
            mask[torch.from_numpy(whole).to(mask.device)] = False
        return mask

    def restrict(self, logits: Tensor) -> Tensor:
        """logits [M, V] with the dropped entries IMPOSSIBLE; differentiable."""
        return logits.masked_fill(self.dropped(logits.shape[-1]), IMPOSSIBLE)

    def restrict_(self, logits: Tensor) -> Tensor:
        """The same in place, outside of autograd."""
        return logits.masked_fill_(self.dropped(logits.shape[-1]), IMPOSSIBLE)
