"""The statistics of prl.compare against values from scipy 1.16."""

from __future__ import annotations

import pytest

from prl.compare.stats import half_width, holm, t_quantile, two_sided_p, welch_p


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.7062047), (2, 4.30265273), (9, 2.26215716), (30, 2.04227246)])
def test_t_quantile(freedom: int, quantile: float) -> None:
    assert t_quantile(0.975, freedom) == pytest.approx(quantile, rel=1e-7)
    assert two_sided_p(quantile, freedom) == pytest.approx(0.05, rel=1e-6)


def test_welch() -> None:
    a, b = [0.91, 0.93, 0.90, 0.95], [0.85, 0.92, 0.80]
    assert welch_p(a, b) == welch_p(b, a) == pytest.approx(0.1913000298855757, rel=1e-9)
    assert welch_p(a, [0.9]) is None
    assert welch_p([0.5, 0.5], [0.5, 0.5]) == 1.0
    assert welch_p([0.5, 0.5], [0.6, 0.6]) == 0.0


def test_half_width() -> None:
    assert half_width([1.0, 2.0, 3.0]) == pytest.approx(4.30265273 / 3**0.5, rel=1e-7)
    assert half_width([1.0]) is None


def test_holm() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
