"""Documents of a packed row that begin alike: the tokens that they have in common are run once, for all of them.

A token's hidden states depend on the tokens up to it alone, so those of a common beginning are the same in every
document, and their gradients add up: what is trained is the same but for rounding. The rollouts of a group share their
prompt, and often more. (Of the same idea for one prompt and its answers: Prefix Grouper, arXiv:2506.05433.)
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class SharedPrefixes:
    """Which tokens of a row are run, and which of these stands for each of the row's.

    doc_lens and shared (D numbers each): tokens of each document, T in all, and how many of its first ones it has in
    common with the document before it, which are run there; 0 for the first.

    run    [N] int64: the tokens of the row that are run, in order
    place  [T] int64: the one of these N that stands for each token of the row
    """

    def __init__(self, doc_lens: Sequence[int], shared: Sequence[int]) -> None:
        self.doc_lens, self.shared = list(doc_lens), list(shared)
        stands = np.arange(sum(self.doc_lens))
        begin = before = 0
        for length, common in zip(self.doc_lens, self.shared, strict=True):
            stands[begin : begin + common] = stands[before : before + common]
            before, begin = begin, begin + length
        run = stands == np.arange(len(stands))
        self.run = torch.from_numpy(np.flatnonzero(run))
        self.place = torch.from_numpy((np.cumsum(run) - 1)[stands])

    def padded(self, tokens: int) -> SharedPrefixes:
        """With so many further tokens of the last document, run behind all others."""
        return SharedPrefixes([*self.doc_lens[:-1], self.doc_lens[-1] + tokens], self.shared) if tokens else self

    def documents(self) -> list[tuple[int, int, int]]:
        """Of each document that has tokens of its own: where it begins in the row, its length, and what it shares."""
        starts = np.cumsum([0, *self.doc_lens[:-1]]).tolist()
        found = zip(starts, self.doc_lens, self.shared, strict=True)
        return [(start, length, common) for start, length, common in found if common < length]
