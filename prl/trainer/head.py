"""The LM head as the losses need it: log-probability and entropy of chosen positions, whole or in chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

AUTO_CHUNK_TOKENS = 8192

Head = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def logprob_head(rows: Tensor, targets: Tensor, temperature: float, chunk: int | Literal["auto", "disabled"]) -> Head:
    """A head for `Qwen3Model.forward`: (hidden [N, H], weight [V, H]) -> log p(target) [M], entropy [M], float32.

    rows [M] are the positions whose next-token distribution is wanted, targets [M] the tokens that followed. The
    distribution is that of logits / temperature, as the engine samples it. With a chunk size (tokens), logits of one
    chunk exist at a time and are recomputed in backward, so memory does not grow with M times V.
    """
    size = None if chunk == "disabled" else AUTO_CHUNK_TOKENS if chunk == "auto" else chunk

    def head(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        picked = hidden[rows]
        if size is None or len(rows) <= size:
            return _logprob_entropy(picked, weight, targets, temperature)
        parts = [
            checkpoint(_logprob_entropy, h, weight, t, temperature, use_reentrant=False, preserve_rng_state=False)
            for h, t in zip(picked.split(size), targets.split(size), strict=True)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    return head


def _logprob_entropy(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight).float()
    if temperature not in (0.0, 1.0):  # greedy engines report the distribution at temperature 1
        logits = logits / temperature
    logprobs = logits.log_softmax(dim=-1)  # [M, V]
    entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
    return -F.nll_loss(logprobs, targets, reduction="none"), entropy
