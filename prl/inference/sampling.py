"""Sampling parameters and a vectorised sampler whose draws do not depend on what else is in the batch.

Noise is counter-based: the uniform number for (seed, position, vocabulary entry) is a hash of the three, so a request draws the same
tokens alone or among others, and again after it was interrupted. The draw is Gumbel-max over the filtered distribution.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# odd 32-bit constants as int32: Fibonacci hashing, and MurmurHash3's finaliser
_GOLDEN, _STEP = 0x9E3779B1 - (1 << 32), 0x27D4EB2F
_MIX1, _MIX2 = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's names and meanings. temperature 0 is greedy; top_k 0 or -1 is off; stop_token_ids end a completion and stay in it."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checks = {
            "n must be at least 1": self.n >= 1,
            "temperature must be at least 0": self.temperature >= 0,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "top_k must be -1, 0 or positive": self.top_k >= -1,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            "max_tokens must be at least 1": self.max_tokens >= 1,
            "min_tokens must be between 0 and max_tokens": 0 <= self.min_tokens <= self.max_tokens,
            "logprobs must be None or 0: only the sampled token's is kept": self.logprobs in (None, 0, 1),
        }
        for message, good in checks.items():
            if not good:
                raise ValueError(message)


@dataclass
class SamplingTable:
    """The parameters of the running rows as tensors, rebuilt only when the set of rows changes. All [B]."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    seed: Tensor  # int64
    plain: bool  # no row filters, so no sort is needed
    greedy_rows: Tensor | None
    banned: list[tuple[int, int, list[int]]]  # (row, tokens before which it holds, stop ids that min_tokens forbids)

    @classmethod
    def build(cls, params: list[SamplingParams], seeds: list[int], eos: tuple[int, ...], device: torch.device) -> SamplingTable:
        def column(values: list[float], dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        greedy = [i for i, p in enumerate(params) if p.temperature == 0]
        return cls(
            temperature=column([p.temperature or 1.0 for p in params])[:, None],
            top_p=column([p.top_p for p in params]),
            top_k=column([p.top_k if p.top_k > 0 else 1 << 30 for p in params], torch.int64),
            min_p=column([p.min_p for p in params]),
            seed=column(seeds, torch.int64),  # type: ignore[arg-type]
            plain=all(p.top_p == 1 and p.top_k <= 0 and p.min_p == 0 for p in params),
            greedy_rows=torch.tensor(greedy, device=device) if greedy else None,
            banned=[
                (i, p.min_tokens, sorted({*p.stop_token_ids, *(() if p.ignore_eos else eos)}))
                for i, p in enumerate(params)
                if p.min_tokens
            ],
        )


def sample(logits: Tensor, table: SamplingTable, positions: Tensor, generated: list[int]) -> tuple[Tensor, Tensor]:
    """Draw one token per row. logits [B, V], positions [B] int64 (index of the token to draw in its sequence).

    Returns tokens [B] int64 and their log-probabilities [B] float32, under the distribution really drawn from: after
    temperature, then top-k, top-p and min-p, renormalised. A greedy row reports the log-probability at temperature 1 without
    filters, because the distribution that it is drawn from is a point mass.
    """
    logits = logits.float()
    for row, minimum, tokens in table.banned:
        if generated[row] < minimum:
            logits[row, tokens] = -torch.inf
    logprobs = (logits / table.temperature).log_softmax(dim=-1)
    if not table.plain:
        logprobs = filter_logprobs(logprobs, table)
    draws = (logprobs + gumbel_noise(table.seed, positions, logits.shape[-1])).argmax(dim=-1)
    if table.greedy_rows is not None:
        draws[table.greedy_rows] = logits[table.greedy_rows].argmax(dim=-1)
        logprobs[table.greedy_rows] = logits[table.greedy_rows].log_softmax(dim=-1)
    return draws, logprobs.gather(-1, draws[:, None]).squeeze(-1)


def filter_logprobs(logprobs: Tensor, table: SamplingTable) -> Tensor:
    """Apply top-k, top-p (nucleus, arXiv:1904.09751) and min-p (arXiv:2407.01082) row by row, then renormalise. [B, V]"""
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keep = ranks[None, :] < table.top_k[:, None]
    probs = probs * keep
    probs = probs / probs.sum(dim=-1, keepdim=True)
    before = probs.cumsum(dim=-1) - probs  # probability mass of the better tokens
    keep &= before < table.top_p[:, None]
    keep &= probs >= table.min_p[:, None] * probs[:, :1]
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return logprobs.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [B, vocab] float32 from 32-bit hashes of (seed, position, entry)."""
    row = _mix((seeds * _GOLDEN + (positions + 1) * _STEP).to(torch.int32))[:, None]
    column = _mix(torch.arange(vocab, device=seeds.device, dtype=torch.int32) * _STEP)[None, :]
    bits = _mix(row + column)
    uniform = bits.float().mul_(2.0**-32).add_(0.5 + 2.0**-33).clamp_(max=1 - 1e-7)  # in (0, 1)
    # log1p keeps full precision for small numbers, and they make the large noise that decides draws
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32 tensors, whose arithmetic wraps as its unsigned original does."""
    x = x ^ ((x >> 16) & 0xFFFF)  # int32 shifts copy the sign; the mask makes them logical
    x *= _MIX1
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX2
    x ^= (x >> 16) & 0xFFFF
    return x
