"""Sampling parameters, and a vectorised sampler whose draws do not depend on what else is in the batch.

Noise is counter-based: the number for (seed, position, vocabulary entry) is a hash of the three, so a request draws the
same tokens alone or among others, and again after it was interrupted. The draw is Gumbel-max over the filtered
distribution.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prl.config.schema import GREEDY_BELOW
from prl.inference.bounds import check_number
from prl.transport.kept import id_dtype

# odd 32-bit constants as int32: Fibonacci hashing, and MurmurHash3's finaliser
_GOLDEN, _STEP = 0x9E3779B1 - (1 << 32), 0x27D4EB2F
_MIX1, _MIX2 = 0x85EBCA6B - (1 << 32), 0xC2B2AE35 - (1 << 32)


@dataclass(frozen=True)
class SamplingParams:
    """vLLM's names and meanings. temperature 0 is greedy; top_k 0 or -1 is off; a stop token stays in its completion.

    Raises ValueError for values out of range, those of `bounds.BOUNDS`.
    """

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
    logprobs: int | None = None  # 0: the sampled token's
    flat_logprobs: bool = False  # answer with numbers, not with an object for each token
    kept_tokens: bool = False  # say from which entries of the vocabulary each token was drawn
    frames: bool = False  # answer as `prl.transport.answers` has it
    routing_start: int = 0  # leave out the experts of so many tokens
    prompt_logprobs: int | None = None  # 0: of each token of the prompt, given those before it

    def __post_init__(self) -> None:
        for name in (
            "n",
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "seed",
            "max_tokens",
            "min_tokens",
            "routing_start",
        ):
            if (value := getattr(self, name)) is not None:
                check_number(name, value)
        if self.top_p == 0:
            raise ValueError("top_p must be above 0")
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens, which is {self.max_tokens}")
        if self.logprobs not in (None, 0):
            raise ValueError("logprobs must be 0 or absent: the built-in engine keeps the sampled token's only")

        if self.prompt_logprobs not in (None, 0):
            told = "the built-in engine tells those of the prompt's own tokens (0)"
            raise ValueError(f"prompt_logprobs={self.prompt_logprobs}: {told}")

    @functools.cached_property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @functools.cached_property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    def stop_ids(self, eos: tuple[int, ...]) -> set[int]:
        """All tokens that end a completion."""
        return {*self.stop_token_ids, *(() if self.ignore_eos else eos)}


def sequence_seed(seed: int, index: int) -> int:
    """The seed of a request's index-th completion, in int64."""
    return (seed + 0x51ED27 * index + (1 << 63)) % (1 << 64) - (1 << 63)


@dataclass
class SamplingTable:
    """The parameters of the running rows as tensors, rebuilt only when the set of rows changes. [B] unless said."""

    temperature: Tensor  # [B, 1] float32; 1 for greedy rows
    seed: Tensor  # int64
    greedy: Tensor | None  # indices of greedy rows
    filtered: Tensor | None  # indices [F] of rows with top-k, top-p or min-p; those parameters of them:
    top_k: Tensor  # [F, 1] int64
    top_p: Tensor  # [F, 1] float32
    min_p: Tensor  # [F, 1] float32
    banned: Tensor | None  # [B, V] bool: stop tokens, forbidden before position
    banned_until: Tensor  # int64
    told: list[int]  # rows of which it is said what they were drawn from

    @classmethod
    def build(
        cls,
        params: Rows[SamplingParams],
        seeds: Rows[int],
        num_prompt: Rows[int],
        eos: tuple[int, ...],
        vocab: int,
        device: torch.device,
    ) -> SamplingTable:
        filtered = [p for p in params if p.filtered]

        def indices(chosen: list[int]) -> Tensor | None:
            return torch.tensor(chosen, device=device) if chosen else None

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        until = [prompt + p.min_tokens for p, prompt in zip(params, num_prompt, strict=True)]
        return cls(
            temperature=column([1.0 if p.greedy else p.temperature for p in params]),
            seed=torch.tensor(seeds, dtype=torch.int64, device=device),
            greedy=indices([i for i, p in enumerate(params) if p.greedy]),
            filtered=indices([i for i, p in enumerate(params) if p.filtered]),
            top_k=torch.tensor([p.top_k if p.top_k > 0 else vocab for p in filtered], device=device)[:, None],
            top_p=column([p.top_p for p in filtered]),
            min_p=column([p.min_p for p in filtered]),
            banned=_ban_table(params, eos, vocab, device) if any(p.min_tokens for p in params) else None,
            banned_until=torch.tensor(until, device=device),
            told=[i for i, p in enumerate(params) if p.kept_tokens],
        )


def _ban_table(params: Rows[SamplingParams], eos: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    banned = torch.zeros(len(params), vocab, dtype=torch.bool)
    for row, p in enumerate(params):
        if p.min_tokens:
            banned[row, sorted(p.stop_ids(eos))] = True
    return banned.to(device)


def log_distribution(logits: Tensor, table: SamplingTable, positions: Tensor) -> Tensor:
    """[B, V] float32, what is drawn from: stop tokens masked while min_tokens holds, temperature, then min-p, top-k and
    top-p (vLLM's order), renormalised; entries that cannot be drawn are -inf. A greedy row is drawn from a point mass,
    whose log-probability says nothing: it has the one at temperature 1.
    """
    logits = logits.float()
    if table.banned is not None:
        logits = logits.masked_fill(table.banned & (positions < table.banned_until)[:, None], -torch.inf)
    logprobs = (logits / table.temperature).log_softmax(dim=-1)
    if table.filtered is not None:  # other rows keep their bits, whoever shares the batch
        logprobs[table.filtered] = filter_logprobs(logprobs[table.filtered], table.min_p, table.top_k, table.top_p)
    return logprobs


def draw(logprobs: Tensor, table: SamplingTable, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One token per row of a `log_distribution` [B, V], and its log-probability: [B] int64, [B] float32."""
    draws = (logprobs + gumbel_noise(table.seed, positions, logprobs.shape[-1])).argmax(dim=-1)
    if table.greedy is not None:
        draws[table.greedy] = logprobs[table.greedy].argmax(dim=-1)
    return draws, logprobs.gather(-1, draws[:, None]).squeeze(-1)


def kept_entries(logprobs: Tensor, rows: list[int]) -> list[np.ndarray]:
    """Of chosen rows of a `log_distribution` [B, V], the ids that can be drawn; none where that is all of them."""
    vocab = logprobs.shape[-1]
    row, ids = (logprobs[rows] > -torch.inf).nonzero(as_tuple=True)
    sizes = torch.bincount(row, minlength=len(rows)).cpu().numpy()
    # int32 halves what a GPU sends; torch has no conversion to numpy's narrower ones everywhere
    found = ids.int().cpu().numpy().astype(id_dtype(vocab))
    pieces = np.split(found, np.cumsum(sizes)[:-1])
    return [piece if len(piece) < vocab else piece[:0] for piece in pieces]


def filter_logprobs(logprobs: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Apply min-p (arXiv:2407.01082), top-k and top-p (nucleus, arXiv:1904.09751) row by row, then renormalise.

    logprobs [F, V]; parameters [F, 1]. Each keeps a prefix of the tokens in order of probability; top-p counts the mass
    of what the first two left. The best token always stays.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    probs = ordered.exp()
    keep = probs >= min_p * probs[:, :1]
    keep &= torch.arange(logprobs.shape[-1], device=logprobs.device)[None, :] < top_k
    probs = probs * keep
    probs = probs / probs.sum(dim=-1, keepdim=True)
    better = probs.cumsum(dim=-1) - probs  # probability mass of the better tokens
    keep &= (better < top_p) | (top_p >= 1)  # the sum may round to more than 1
    keep[:, 0] = True
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return logprobs.masked_fill(~kept, -torch.inf).log_softmax(dim=-1)


def gumbel_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [B, vocab] float32, finite, from 32-bit hashes of (seed, position, entry)."""
    row = _mix((seeds * _GOLDEN).to(torch.int32) ^ (seeds >> 32).to(torch.int32))
    row = _mix(row + ((positions + 1) * _STEP).to(torch.int32))
    column = _mix(torch.arange(vocab, device=seeds.device, dtype=torch.int32) * _STEP)
    bits = _mix(row[:, None] + column[None, :]) & 0x7FFFFFFF
    # (0, 1), exact near 0: small numbers make the large noise that decides draws, and 0 itself would make it infinite
    uniform = bits.float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix(x: Tensor) -> Tensor:
    """MurmurHash3's finaliser on int32 tensors, whose arithmetic wraps as its unsigned original does."""
    x = x ^ ((x >> 16) & 0xFFFF)  # int32 shifts copy the sign; the mask makes them logical
    x *= _MIX1
    x ^= (x >> 13) & 0x7FFFF
    x *= _MIX2
    x ^= (x >> 16) & 0xFFFF
    return x
