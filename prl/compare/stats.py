"""What can be said about means over few seeds: Student's interval, Welch's test, Holm's correction.

Without scipy, which prl does not need otherwise: the t distribution comes from the incomplete beta function.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

LEVEL = 0.95
FOOTNOTE = (
    "± is Student's 95 % interval of the mean over seeds, t(0.975, n-1) s/√n. Against the best group: Welch's "
    "two-sided test, t = (m1 - m2)/√(s1²/n1 + s2²/n2) with Welch-Satterthwaite degrees of freedom (B. L. Welch, "
    "Biometrika 34, 1947); p values corrected over all groups by Holm's step-down rule (S. Holm, Scand. J. Statist. "
    "6, 1979); indistinguishable: corrected p > 0.05. The best is chosen by the same data, which favours it."
)


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def variance(values: Sequence[float]) -> float:
    """The unbiased one, of at least two values."""
    centre = mean(values)
    return math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1)


def half_width(values: Sequence[float], level: float = LEVEL) -> float | None:
    """Half of the confidence interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return t_quantile(0.5 + level / 2, len(values) - 1) * math.sqrt(variance(values) / len(values))


def welch_p(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Two-sided p that both have the same mean, variances not assumed equal; None with fewer than two values in one."""
    if len(a) < 2 or len(b) < 2:
        return None
    share_a, share_b = variance(a) / len(a), variance(b) / len(b)
    difference = mean(a) - mean(b)
    if share_a + share_b == 0:
        return 1.0 if difference == 0 else 0.0
    freedom = (share_a + share_b) ** 2 / (share_a**2 / (len(a) - 1) + share_b**2 / (len(b) - 1))
    return two_sided_p(difference / math.sqrt(share_a + share_b), freedom)


def holm(p_values: Sequence[float]) -> list[float]:
    """p values corrected for their number, in the order given."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        corrected[index] = largest
    return corrected


def two_sided_p(t: float, freedom: float) -> float:
    """P(|T| > |t|) for Student's T."""
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


@functools.cache  # a page of curves asks for few of them, thousands of times
def t_quantile(probability: float, freedom: float) -> float:
    """The t with P(T < t) = probability, for probability > 0.5, by bisection."""
    low, high = 0.0, 1.0
    while 1 - two_sided_p(high, freedom) / 2 < probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if 1 - two_sided_p(middle, freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised I_x(a, b), from its continued fraction (DLMF 8.17.22), which converges for x < a / (a + b)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(log_front) / a / _beta_fraction(a, b, x)


def _beta_fraction(a: float, b: float, x: float) -> float:
    """1 + d1/(1 + d2/(1 + ...)), from its far end."""
    value = 1.0
    for n in range(200, 0, -1):
        m = n // 2
        if n % 2:
            d = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            d = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        value = 1 + d / value
    return value
