"""Group-relative advantages and length rules: from the rewards of one task's rollouts to one number per rollout."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from prl.config.schema import AlgoConfig

EPSILON = 1e-6


def group_mean(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean(r), GRPO without the standard deviation (Dr. GRPO, arXiv:2503.20783). [G] -> [G]"""
    return rewards - rewards.mean()


def grpo(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / std(r), as published (DeepSeekMath, arXiv:2402.03300). [G] -> [G]"""
    return (rewards - rewards.mean()) / (rewards.std() + EPSILON)


def rloo(rewards: np.ndarray) -> np.ndarray:
    """A_i = r_i - mean of the others (REINFORCE leave-one-out, arXiv:2402.14740). [G] -> [G]"""
    size = len(rewards)
    return (rewards - rewards.mean()) * (size / (size - 1))


def maxrl(rewards: np.ndarray) -> np.ndarray:
    """A_i = (r_i - mean(r)) / mean(r), weighted as maximum likelihood would (MaxRL, arXiv:2602.02710). [G] -> [G]

    Tasks that are rarely solved weigh more, as in log-likelihood. Defined for rewards >= 0; all-zero groups give zeros.
    """
    mean = rewards.mean()
    return (rewards - mean) / mean if mean > EPSILON else np.zeros_like(rewards)


ADVANTAGES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "group_mean": group_mean,
    "grpo": grpo,
    "rloo": rloo,
    "maxrl": maxrl,
}


def overlong_penalty(lengths: np.ndarray, max_tokens: int, buffer: int) -> np.ndarray:
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13): 0 up to max_tokens - buffer, then linear to -1.
    [G] -> [G]
    """
    if buffer == 0:
        return np.where(lengths >= max_tokens, -1.0, 0.0)
    return -np.clip((lengths - (max_tokens - buffer)) / buffer, 0.0, 1.0)


def group_advantages(
    rewards: np.ndarray, lengths: np.ndarray, truncated: np.ndarray, algo: AlgoConfig, max_tokens: int
) -> np.ndarray:
    """Advantages [G] of one group's rollouts, length rule included; a group of one has no baseline and gets zero.

    lengths are completion tokens. With length_rule=dapo_filter, rollouts that ran into the limit get no gradient at
    all (overlong filtering, arXiv:2503.14476), because their reward says nothing about where they were heading.
    """
    if algo.length_rule == "dapo_overlong":
        rewards = rewards + overlong_penalty(lengths, max_tokens, algo.overlong_buffer)
    if len(rewards) < 2:
        return np.zeros_like(rewards)
    advantages = ADVANTAGES[algo.advantage](rewards)
    if algo.length_rule == "dapo_filter":
        advantages = np.where(truncated, 0.0, advantages)
    return advantages


def has_signal(advantages: np.ndarray) -> bool:
    return bool(np.abs(advantages).max(initial=0.0) > EPSILON)
