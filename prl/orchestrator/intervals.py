"""95 % intervals of means over an evaluation's tasks: these were drawn, and samples of one task hang together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z = 1.959964  # of the normal distribution, two-sided, 95 %
DRAWS = 10_000
ABOUT = (
    "95 % intervals over tasks: Wilson's score interval (E. B. Wilson, JASA 22, 1927) where each task counts 0 or 1, "
    "else the percentile bootstrap over tasks (10,000 draws, always the same ones), which keeps the samples of a task "
    "together. pass@k: the unbiased estimator of arXiv:2107.03374, averaged over tasks."
)


def interval_over_tasks(values: Sequence[float]) -> tuple[float, float] | None:
    """(low, high) of the mean of one value per task; None for fewer than two tasks."""
    if len(values) < 2:
        return None
    if set(values) <= {0.0, 1.0}:
        return wilson(int(sum(values)), len(values))
    return bootstrap(values)


def wilson(successes: int, count: int) -> tuple[float, float]:
    """Of the chance behind so many successes; never empty, not even where all or none succeeded."""
    share, spread = successes / count, Z * Z / count
    centre = share + spread / 2
    half = Z * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, (centre - half) / (1 + spread)), min(1.0, (centre + half) / (1 + spread))


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """The middle 95 % of the means of tasks drawn with replacement."""
    rng, array = np.random.default_rng(0), np.asarray(values, np.float64)
    # 100 at a time: of thousands of tasks all draws at once would take gigabytes
    means = [array[rng.integers(len(array), size=(100, len(array)))].mean(1) for _ in range(DRAWS // 100)]
    low, high = np.quantile(np.concatenate(means), [0.025, 0.975])
    return float(low), float(high)
