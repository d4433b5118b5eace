"""Requests and the sequences that they become inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prl.inference.sampling import SamplingParams


@dataclass
class Request:
    """One call of the generate route; n > 1 makes n sequences that share the prompt."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    cache_salt: str = ""
    priority: int = 0  # lower first, as in vLLM
    arrival: int = 0  # ties in priority go first come, first served


@dataclass(eq=False)
class Sequence:
    """One completion in the making."""

    request: Request
    index: int  # which of the request's n
    seed: int
    token_ids: list[int]  # prompt and completion
    slot: int = -1  # row of the KV cache; -1: not running
    epoch: int = -1  # the engine's, when the first of its KV was computed
    computed: int = 0  # leading tokens whose KV is in the slot
    cached: int = 0  # of the prompt, those whose KV was there when it began
    logprobs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # weight version of each sampled token
    routed: list[np.ndarray] = field(default_factory=list)  # [tokens, L, K] uint8 or uint16 pieces, in token order
    kept: list[np.ndarray] = field(default_factory=list)  # of each sampled token, if asked: ids it was drawn from
    prompt_logprobs: list[float] = field(default_factory=list)  # of the prompt's tokens but the first, if asked
    finish_reason: str | None = None
    stop_reason: int | None = None
    error: str | None = None  # what it failed of, where finish_reason is "error"
    num_prompt: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt = len(self.request.prompt_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :]

    def append(self, token: int, logprob: float, version: str) -> None:
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    def check_finished(self, eos: tuple[int, ...], max_model_len: int) -> None:
        """Set finish_reason and stop_reason as vLLM does: the token for a stop token, none for EOS."""
        params, token, generated = self.request.params, self.token_ids[-1], self.num_generated
        if generated >= params.min_tokens:
            if token in eos and not params.ignore_eos:
                self.finish_reason = "stop"
                return
            if token in params.stop_token_ids:
                self.finish_reason, self.stop_reason = "stop", token
                return
        if generated >= params.max_tokens or len(self.token_ids) >= max_model_len:
            self.finish_reason = "length"

    def start_over(self) -> None:
        """Forget what was computed, not what was sampled: the KV is gone."""
        self.slot, self.computed, self.routed = -1, 0, []

    def version_spans(self) -> list[dict[str, Any]]:
        """Runs of equal versions over the completion's tokens, as vLLM's WeightVersionSpan."""
        spans: list[dict[str, Any]] = []
        for i, version in enumerate(self.versions):
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = i + 1
            else:
                spans.append({"version": version, "start": i, "end": i + 1})
        return spans

    def routed_experts(self) -> np.ndarray | None:
        """[num_tokens - 1, L, K]: the last token was never forwarded. None before the first forward pass."""
        return np.concatenate(self.routed)[: len(self.token_ids) - 1] if self.routed else None
