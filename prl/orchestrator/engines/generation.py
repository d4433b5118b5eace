"""What an engine answers, whatever engine it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prl.transport.kept import KeptTokens


@dataclass
class Generation:
    """One answer of an engine."""

    token_ids: list[int]
    logprobs: list[float] | np.ndarray  # of the distribution sampled from
    versions: list[int] | np.ndarray  # policy version of each token
    finish_reason: str  # "stop" | "length" | "abort"
    routed_experts: np.ndarray | None  # [prompt + completion - 1 - routing_start, L, K] uint8 or uint16
    kept: KeptTokens | None = None  # what each token was drawn from, where sampling is truncated
    cached_tokens: int | None = None  # of the prompt, in the engine's prefix cache; None: it does not say
    routing_start: int = 0  # how many tokens at the front have no row in routed_experts: they were known
