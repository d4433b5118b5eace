"""What one rollout leaves behind."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prl.envs.protocol import Outcome
from prl.models.text.chat import Message
from prl.transport.kept import KeptTokens


@dataclass
class Generation:
    """One answer of an engine."""

    token_ids: list[int]
    logprobs: list[float]  # of the distribution sampled from
    versions: list[int]  # policy version of each token
    finish_reason: str  # "stop" | "length" | "abort"
    routed_experts: np.ndarray | None  # [prompt + completion - 1, L, K] uint8 or uint16
    kept: KeptTokens | None = None  # what each token was drawn from, where sampling is truncated
    cached_tokens: int | None = None  # of the prompt, in the engine's prefix cache; None: it does not say


@dataclass
class Sample:
    """One training sequence: a stretch of conversation in which every token was only ever appended. Lists are [T]."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[bool] = field(default_factory=list)
    logp_infer: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    routed_experts: np.ndarray | None = None  # [T, L, K] uint8 or uint16
    kept: KeptTokens | None = None  # up to the last sampled token

    def append_prompt(self, ids: list[int]) -> None:
        self.input_ids += ids
        self.loss_mask += [False] * len(ids)
        self.logp_infer += [0.0] * len(ids)
        self.versions += [-1] * len(ids)

    def append_generation(self, generation: Generation) -> None:
        if generation.kept is not None:
            before = (self.kept or KeptTokens.whole(0)).fit(len(self.input_ids))
            self.kept = KeptTokens.join([before, generation.kept])
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
    asked_tokens: int = 0  # prompts of all turns, as far as engines say what they found of them in their prefix caches
    cached_tokens: int = 0  # and what they found
    messages: list[Message] = field(default_factory=list)  # what was said, for people
    metrics: dict[str, float] = field(default_factory=dict)  # what the environment measured besides the reward
    outcome: Outcome = "policy"  # or "timeout", where that counts as reward 0 (env.on_timeout)

    @property
    def oldest_version(self) -> int:
        """Of all its sampled tokens."""
        return min(v for s in self.samples for v, m in zip(s.versions, s.loss_mask, strict=True) if m)


class RolloutFailed(Exception):
    """Something failed this one rollout.

    Attributes:
        outcome: what did.
        trace: the end of a traceback, in the environment's process if it is the environment's.
    """

    def __init__(self, error: str, outcome: Outcome = "environment", trace: str = "") -> None:
        super().__init__(error)
        self.outcome, self.trace = outcome, trace


class EnvironmentGone(RolloutFailed):
    """The environment's process ended under it; the next one may do what this one could not."""

    def __init__(self, why: str = "") -> None:
        super().__init__(f"the environment's process went away{why}", "infrastructure")


@dataclass(frozen=True)
class FailedRollout:
    """What is left of a rollout that came to nothing."""

    outcome: Outcome
    error: str


@dataclass
class Group:
    """All rollouts of one task. `index` counts groups over the whole run and fixes task and seeds."""

    index: int
    env: str
    size: int
    rollouts: list[Rollout | FailedRollout] = field(default_factory=list)

    @property
    def finished(self) -> list[Rollout]:
        return [r for r in self.rollouts if isinstance(r, Rollout)]

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(r.outcome for r in self.rollouts)

    @property
    def oldest_version(self) -> int:
        return min(r.oldest_version for r in self.finished)
