"""What one rollout leaves behind."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from prl.envs.protocol import Outcome
from prl.models.text.chat import Message
from prl.orchestrator.engines.generation import Generation
from prl.transport.kept import KeptTokens

NONE_SAMPLED = int(np.iinfo(np.int32).max)  # younger than any version


@dataclass
class Sample:
    """One training sequence: a stretch of conversation in which every token was only ever appended. All are [T].

    Arrays, which take 13 bytes a token where lists take about 100, and into which the garbage collector does not look:
    it held the event loop for 0.2 s at a time while 192 rollouts of 32k tokens were there.
    """

    input_ids: array[int] = field(default_factory=lambda: array("i"))
    loss_mask: array[int] = field(default_factory=lambda: array("b"))  # 0 or 1
    logp_infer: array[float] = field(default_factory=lambda: array("f"))
    versions: array[int] = field(default_factory=lambda: array("i"))
    routing: list[np.ndarray] = field(default_factory=list)  # [some tokens, L, K] each, as they came; all but the last
    kept: KeptTokens | None = None  # up to the last sampled token
    # a teacher's part, beyond the rollout's advantage: float32 of its first tokens, as many as are trained; 0 unsampled
    bonus: np.ndarray | None = None
    oldest_version: int = NONE_SAMPLED  # of its sampled tokens; the producer asks whenever a group ends

    @property
    def routed_tokens(self) -> int:
        """Of how many tokens, from the first on, the experts are known."""
        return sum(map(len, self.routing))

    def routed_experts(self, tokens: int) -> list[np.ndarray] | None:
        """Of the first `tokens`, in pieces. The last of all was never forwarded; nothing is predicted from it, so any
        routing will do.
        """
        found = []
        for piece in [*self.routing, self.routing[-1][-1:]] if self.routing else []:
            found.append(piece[:tokens])
            tokens -= len(found[-1])
        return found or None

    def advantages(self, of_rollout: float) -> np.ndarray:
        """[T] float32: 0 where nobody sampled."""
        mask = np.asarray(self.loss_mask).view(bool)
        plain = np.where(mask, np.float32(of_rollout), np.float32(0))
        if self.bonus is not None:
            plain[: len(self.bonus)] += self.bonus
        return plain

    def append_prompt(self, ids: list[int]) -> None:
        self.input_ids.extend(ids)
        self.loss_mask.extend(array("b", [0]) * len(ids))
        self.logp_infer.extend(array("f", [0.0]) * len(ids))
        self.versions.extend(array("i", [-1]) * len(ids))

    def append_generation(self, generation: Generation) -> None:
        if generation.kept is not None:
            before = (self.kept or KeptTokens.whole(0)).fit(len(self.input_ids))
            self.kept = KeptTokens.join([before, generation.kept])
        # each made at once: to extend by a list takes several times as long, during which the event loop is held
        self.input_ids += array("i", generation.token_ids)
        self.loss_mask.frombytes(b"\1" * len(generation.token_ids))
        self.logp_infer.frombytes(np.asarray(generation.logprobs, np.float32).tobytes())
        versions = np.asarray(generation.versions, np.int32)
        self.versions.frombytes(versions.tobytes())
        self.oldest_version = min(self.oldest_version, int(versions.min(initial=NONE_SAMPLED)))
        if generation.routed_experts is not None:
            if generation.routing_start not in (0, self.routed_tokens):
                raise ValueError(
                    f"experts from token {generation.routing_start} on, and {self.routed_tokens} are known"
                )
            self.routing = [*(self.routing if generation.routing_start else ()), generation.routed_experts]


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
        return min(sample.oldest_version for sample in self.samples)


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
