"""What one rollout leaves behind."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from prl.models.chat import Message


@dataclass
class Generation:
    """One answer of an engine."""

    token_ids: list[int]
    logprobs: list[float]  # of the distribution sampled from
    versions: list[int]  # policy version of each token
    finish_reason: str  # "stop" | "length" | "abort"
    routed_experts: np.ndarray | None  # [prompt + completion - 1, L, K] uint8


@dataclass
class Sample:
    """One training sequence: a stretch of conversation in which every token was only ever appended. Lists are [T]."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logp_infer: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None  # [T, L, K] uint8

    def append_prompt(self, ids: list[int]) -> None:
        self.input_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logp_infer += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def append_generation(self, generation: Generation) -> None:
        self.input_ids += generation.token_ids
        self.loss_mask += [True] * len(generation.token_ids)
        self.logp_infer += generation.logprobs
        self.versions += generation.versions
        routed = generation.routed_experts
        if routed is not None:
            # the last token was never forwarded; nothing is predicted from it, so any routing will do
            self.routed_experts = np.concatenate([routed, routed[-1:]])


@dataclass
class Rollout:
    """A finished conversation with its reward."""

    env: str
    task: str
    reward: float
    samples: list[Sample]
    prompt_tokens: int
    completion_tokens: int
    truncated: bool
    turns: int
    advantage: float = 0.0
    messages: list[Message] = field(default_factory=list)  # what was said, for people
    metrics: dict[str, float] = field(default_factory=dict)  # what the environment measured besides the reward

    @property
    def oldest_version(self) -> int:
        """Of all its sampled tokens."""
        return min(v for s in self.samples for v, m in zip(s.versions, s.loss_mask, strict=True) if m)


@dataclass
class Group:
    """All rollouts of one task. `index` counts groups over the whole run and fixes task and seeds."""

    index: int
    env: str
    size: int
    rollouts: list[Rollout | None] = field(default_factory=list)  # None: this rollout failed

    @property
    def finished(self) -> list[Rollout]:
        return [r for r in self.rollouts if r is not None]

    @property
    def oldest_version(self) -> int:
        return min(r.oldest_version for r in self.finished)
