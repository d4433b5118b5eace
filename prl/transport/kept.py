"""Which tokens truncated sampling (top-p, top-k, min-p) left to draw from, for each token of a sequence.

Engines renormalise over these, so the trainer must, too: its log-probability of a token is that within the same set.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class KeptTokens:
    """Ragged sets of token ids, one for each of T tokens."""

    counts: np.ndarray  # [T] int32; 0: the whole vocabulary, and what nobody sampled
    ids: np.ndarray  # [sum of counts] uint16 or uint32, token after token

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def whole(cls, tokens: int) -> KeptTokens:
        """Of tokens that were drawn from the whole vocabulary, or not drawn."""
        return cls(np.zeros(tokens, np.int32), np.zeros(0, np.uint16))

    @classmethod
    def of_sets(cls, sets: Sequence[np.ndarray]) -> KeptTokens:
        """One array of ids for each token."""
        if not sets:
            return cls.whole(0)
        ids = np.concatenate(sets)
        return cls(np.array([len(one) for one in sets], np.int32), ids.astype(id_dtype(int(ids.max(initial=0)) + 1)))

    @classmethod
    def join(cls, parts: Iterable[KeptTokens]) -> KeptTokens:
        """One after another."""
        parts = list(parts)
        return cls(np.concatenate([p.counts for p in parts]), np.concatenate([p.ids for p in parts]))

    def fit(self, tokens: int) -> KeptTokens:
        """Cut at the end, or filled up with tokens that nobody drew, to this length."""
        counts = self.counts[:tokens]
        part = KeptTokens(counts, self.ids[: int(counts.sum())])
        return part if len(part) == tokens else KeptTokens.join([part, KeptTokens.whole(tokens - len(part))])

    def of_rows(self, rows: np.ndarray) -> KeptTokens:
        """The sets of chosen tokens [M], in their order."""
        counts = self.counts[rows]
        starts = (np.cumsum(self.counts, dtype=np.int64) - self.counts)[rows]
        shifts = starts - (np.cumsum(counts, dtype=np.int64) - counts)
        return KeptTokens(counts, self.ids[np.repeat(shifts, counts) + np.arange(int(counts.sum()))])

    def to_json(self) -> dict[str, str]:
        return {"counts": encode_array(self.counts), "ids": encode_array(self.ids)}

    @classmethod
    def from_json(cls, value: Any) -> KeptTokens:
        """Raises ValueError for what is not the JSON of such sets."""
        try:
            counts, ids = decode_array(value["counts"]), decode_array(value["ids"])
        except (KeyError, TypeError, binascii.Error, EOFError) as error:
            raise ValueError(f"no sets of kept tokens: {type(error).__name__}: {error}") from error
        flat = counts.ndim == ids.ndim == 1 and counts.dtype.kind in "iu" and ids.dtype.kind in "iu"
        if not flat or (counts < 0).any() or int(counts.sum()) != len(ids):
            raise ValueError(f"{len(ids)} ids are not those of sets of the sizes given")
        return cls(counts.astype(np.int32), ids)


LEAST = -9999.0  # vLLM's own substitute for minus infinity and NaN, which JSON does not have


def kept_of_candidates(lengths: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> tuple[KeptTokens, float]:
    """From vLLM's log-probabilities, as they are processed for sampling, of the most probable tokens.

    Of each of T tokens there are lengths [T] candidates in a row of ids and logprobs: first the token that was sampled,
    which may come again, then the best. Returns those that could be drawn, and the least total probability of any set:
    less than 1 where some were not among the candidates, or probabilities are those before truncation.
    """
    starts = np.cumsum(lengths) - lengths
    token = np.repeat(np.arange(len(lengths)), lengths)
    is_first = np.zeros(len(ids), bool)
    is_first[starts] = True
    again = np.bincount(token[(ids == ids[starts][token]) & ~is_first], minlength=len(lengths)) > 0
    chosen = np.where(is_first, ~again[token], logprobs > LEAST)
    mass = np.bincount(token[chosen], np.exp(logprobs[chosen]), minlength=len(lengths))
    counts, found = np.bincount(token[chosen], minlength=len(lengths)), ids[chosen]
    dtype = id_dtype(int(found.max(initial=0)) + 1)
    return KeptTokens(counts.astype(np.int32), found.astype(dtype)), float(mass.min(initial=1.0))


def id_dtype(vocab: int) -> type[np.uint16] | type[np.uint32]:
    """The narrowest that holds every token id of a vocabulary."""
    return np.uint16 if vocab <= 1 << 16 else np.uint32


def encode_array(array: np.ndarray) -> str:
    """base64 of .npy bytes, the way vLLM sends arrays."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def decode_array(text: str) -> np.ndarray:
    """Inverse of `encode_array`. Raises ValueError (binascii.Error is one) or EOFError."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
