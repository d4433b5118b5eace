"""A forecast as tables for people, and as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from prl.forecast.forecast import LEAST, NIC_SHARE, ROLLOUT_FACTOR, Forecast
from prl.forecast.memory import GIB

MOST_RATES = 16


def as_json(told: Forecast) -> dict[str, Any]:
    timing, rollouts = told.timing, told.timing.rollouts
    return {
        "point_id": told.plan.point_id,
        "hardware": told.hardware.name,
        "assumptions": told.assumptions,
        "too_large": told.too_large,
        "tokens_per_step": told.work.tokens,
        "micro_batches": len(told.work.laps),
        "work_imbalance": told.work.imbalance,
        "seconds": {name: cost.total for name, cost in timing.costs.items()},
        "trainer_s": timing.trainer_s,
        "trainer_interval_s": list(told.trainer),
        "rollouts": None if rollouts is None else {
            "seconds": rollouts.seconds,
            "longest_over_staleness_s": rollouts.bound_s,
            "engines": rollouts.engines,
            "sequences_at_once": rollouts.sequences,
            "limited_by": rollouts.limited_by,
            "decoding_step_s": rollouts.step_s,
            "cache_gib": rollouts.cache_gib,
        },
        "overlap": timing.overlap,
        "step_s": timing.step_s,
        "interval_s": list(told.interval),
        "bound_by": timing.bound_by,
        "tokens_per_s": told.tokens_per_s,
        "bytes_per_gpu": [{"what": what, "link": link, "bytes": n} for (what, link), n in told.traffic.items()],
        "peak": {"bytes": told.peak.total, "moment": told.peak.moment, "parts": told.peak.parts},
        "host_memory_of_a_node": told.host,
        "sensitivity": {name: asdict(s) for name, s in told.sensitivity.items()},
        "rates": {
            name: {"kind": rate.kind, "unit": rate.unit, "from": rate.source}
            for name, rate in told.hardware.rates.items()
        },
    }  # fmt: skip


def render(told: Forecast) -> str:
    """The assumptions first, then what follows from them."""
    parts = (_head(told), _seconds(told), _bytes(told), _peak(told), _host(told), _rates(told))
    return "\n\n".join("\n".join(part) for part in parts if part)


def _head(told: Forecast) -> list[str]:
    timing, mesh, (low, high) = told.timing, told.plan.mesh, told.interval
    sizes = f"dp_replicate {mesh.dp_replicate} x dp_shard {mesh.dp_shard} x cp {mesh.cp}, ep {mesh.ep}"
    rows = f"{len(told.work.laps)} micro-batch{'es' if len(told.work.laps) > 1 else ''} a rank"
    uneven = f"longest rows {told.work.imbalance:.2f} times the mean"
    guessed = f"; rollouts within a factor of {ROLLOUT_FACTOR:g}, which is a guess" if timing.rollouts else ""
    return [
        f"point       {told.plan.point_id}, model {told.plan.config.model.name}, {sizes}",
        f"hardware    {told.hardware.about}",
        *(f"assumed     {text}" for text in told.assumptions),
        *(f"too large   {text}" for text in told.too_large),
        f"work        {told.work.tokens:,} tokens a step, {rows}, {uneven}",
        f"step        {_s(timing.step_s)} ({_s(low)} to {_s(high)}); {timing.overlap}; bound by {timing.bound_by}",
        f"tokens/s    {told.tokens_per_s:,.0f}, {told.tokens_per_s / mesh.world_size:,.0f} a GPU of the trainer",
        "interval    the trainer's: the error of fits to other rows, all of one node, and NICs down to"
        f" {NIC_SHARE:.0%} of their wire{guessed}",
    ]


def _seconds(told: Forecast) -> list[str]:
    timing, rollouts = told.timing, told.timing.rollouts
    rows = [("phase of the trainer", "s", "share")]
    busy = max(timing.trainer_s, 1e-12)
    rows += [(name, _s(cost.total), f"{cost.total / busy:.1%}") for name, cost in timing.costs.items() if cost.total]
    low, high = told.trainer
    rows.append((f"all, one after another ({_s(low)} to {_s(high)})", _s(timing.trainer_s), ""))
    lines = _table(rows)
    if rollouts is not None:
        lines += [
            "",
            f"rollouts    {_s(timing.rollout_s)}: {rollouts.engines} engines of {rollouts.sequences:.0f} sequences at"
            f" once ({rollouts.limited_by}), {1e3 * rollouts.step_s:.1f} ms a token,"
            f" cache {rollouts.cache_gib:.1f} GiB a GPU",
            f"staleness   for the longest rollout not to be too old, a step takes {_s(rollouts.bound_s)} or more",
        ]
    return lines


def _bytes(told: Forecast) -> list[str]:
    rows = [(what, link, f"{n / 1e9:,.3g}") for (what, link), n in told.traffic.items() if n]
    return _table([("a trainer's GPU sends in a step", "over", "GB"), *rows]) if rows else []


def _peak(told: Forecast) -> list[str]:
    rows = [(f"peak of a rank: {told.peak.moment}", "GiB")]
    parts = sorted(told.peak.parts.items(), key=lambda item: -item[1])
    total = f"{told.peak.total / GIB:.1f} of {told.memory_gib:.5g}"
    return _table([*rows, *((name, f"{n / GIB:.2f}") for name, n in parts), ("all", total)])


def _host(told: Forecast) -> list[str]:
    if not told.host:
        return []
    parts = sorted(told.host.items(), key=lambda item: -item[1])
    total = ("all, beside the processes' own", f"{sum(told.host.values()) / GIB:.2f}")
    rows = [(name, f"{n / GIB:.2f}") for name, n in parts]
    return _table([("host memory of a node, for its trainer ranks", "GiB"), *rows, total])


def _rates(told: Forecast) -> list[str]:
    rows = [("d ln seconds / d ln rate", "step", "trainer", "rollouts", "the rate is")]
    for name, s in list(told.sensitivity.items())[:MOST_RATES]:
        step, trainer, rollouts = (f"{v:.3f}" if abs(v) >= LEAST else "" for v in (s.step, s.trainer, s.rollouts))
        rows.append((name, step, trainer, rollouts, told.hardware.rates[name].kind))
    return _table(rows)


def _s(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines
