"""Advantage functions and length rules against numbers worked out by hand."""

import numpy as np
import pytest

from prl.config.schema import AlgoConfig
from prl.orchestrator.rollouts.advantages import ADVANTAGES, group_advantages, has_signal, overlong_penalty

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 0.5])  # mean 0.5, std sqrt(0.2)

BY_HAND = {
    "group_mean": [0.5, -0.5, -0.5, 0.5, 0.0],
    "grpo": [1.118034, -1.118034, -1.118034, 1.118034, 0.0],  # +-0.5 / sqrt(0.2)
    "rloo": [0.625, -0.625, -0.625, 0.625, 0.0],  # r_i - mean of the other four
    "maxrl": [1.0, -1.0, -1.0, 1.0, 0.0],  # (r - mean) / mean
}


@pytest.mark.parametrize("name", ADVANTAGES)
def test_advantages_by_hand(name):
    np.testing.assert_allclose(ADVANTAGES[name](REWARDS), BY_HAND[name], atol=1e-4)


def test_rloo_is_the_leave_one_out_baseline():
    expected = [r - np.delete(REWARDS, i).mean() for i, r in enumerate(REWARDS)]
    np.testing.assert_allclose(ADVANTAGES["rloo"](REWARDS), expected)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_rewards_carry_no_signal(name, value):
    assert not has_signal(ADVANTAGES[name](np.full(4, value)))


def test_overlong_penalty_is_linear_over_the_buffer():
    lengths = np.array([10, 80, 90, 100])
    np.testing.assert_allclose(overlong_penalty(lengths, max_tokens=100, buffer=20), [0.0, 0.0, -0.5, -1.0])
    np.testing.assert_allclose(overlong_penalty(lengths, max_tokens=100, buffer=0), [0.0, 0.0, 0.0, -1.0])


def advantages(length_rule, rewards, lengths, truncated):
    algo = AlgoConfig(length_rule=length_rule, overlong_buffer=20)
    return group_advantages(np.array(rewards), np.array(lengths), np.array(truncated), algo, max_tokens=100).tolist()


def test_length_rules():
    rewards, lengths, truncated = [1.0, 1.0], [50, 100], [False, True]
    assert advantages("none", rewards, lengths, truncated) == [0.0, 0.0]
    assert advantages("dapo_overlong", rewards, lengths, truncated) == [0.5, -0.5]
    assert advantages("dapo_filter", [1.0, 0.0], lengths, truncated) == [0.5, 0.0]


def test_a_single_survivor_has_no_baseline():
    assert advantages("none", [1.0], [5], [False]) == [0.0]
