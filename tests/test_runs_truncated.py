"""Whole runs that learn from truncated sampling: trainer and engine renormalise over the same tokens."""

from __future__ import annotations

import pytest
from runs import UNEVALUATED, rows, run

pytestmark = pytest.mark.slow

# synchronous, one step: tokens are sampled and trained by the same weights, so each ratio is 1 up to rounding
FIRST_STEP = [*UNEVALUATED, "algo=sync", "max_steps=1"]
WAYS = {
    "top_p": ["inference.sampling.top_p=0.9"],
    "top_k": ["inference.sampling.top_k=20", "parallelism=cp2"],
    "min_p": ["inference.sampling.min_p=0.2", "memory=tight", "parallelism.dp_shard=2"],
    "all, greedy evaluation": [
        *("inference.sampling.top_p=0.95", "inference.sampling.top_k=40", "inference.sampling.temperature=0.8"),
        *("inference.sampling.min_p=0.01", "memory=tight", "parallelism=cp2_ring"),
        *("eval.interval=1", "eval.at_end=true", "eval.num_tasks=8", "eval.top_k=1"),
    ],
}
SINGLE = ("top_p", "top_k")  # which the last has, too


@pytest.mark.parametrize(
    "choices",
    [pytest.param(way, id=name, marks=pytest.mark.exhaustive if name in SINGLE else ()) for name, way in WAYS.items()],
)
def test_the_mean_importance_ratio_is_1_under_truncated_sampling(choices, tmp_path):
    done = run([*FIRST_STEP, f"cache_dir={tmp_path}/cache", *choices, f"output_dir={tmp_path}/run"], tmp_path)
    assert done.code == 0, done.output
    (row,) = rows(tmp_path / "run", "trainer.0")
    assert row["importance_ratio_mean"] == pytest.approx(1, abs=1e-3)
    assert row["mismatch_kl_max"] < 1e-5
    if "eval.interval=1" in choices:
        assert any("eval/reward" in one for one in rows(tmp_path / "run", "orchestrator"))
