"""`python -m prl.forecast.validation [--fit | --draws=N]`: the forecast of runs that were measured, beside what was.

The constants of the hardware card are found on a few rows. The error bar is that of the worst of ten fits to other
rows, drawn at random: some of them have seen no expert parallelism, or a single GPU only.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

import yaml

from prl.config.arguments import a_count_or_0
from prl.config.composing import compose
from prl.config.schema import RunConfig
from prl.forecast.hardware import Constants, Hardware, load_hardware
from prl.forecast.memory import GIB, peak_memory
from prl.forecast.optimizing import optimizer_step
from prl.forecast.setting import Setting
from prl.forecast.training import micro_batch, step_end

ROWS = resources.files("prl.forecast") / "measured.yaml"
COVERED = 0.95  # of held-out rows, by the interval
FITTED = ("products", "eager_passes", "contention", "expert_wait")
HEADER = """\
| | run | tokens/s per GPU | forecast | ratio | peak, GiB | forecast | ratio |
|---|---|---|---|---|---|---|---|"""


@dataclass(frozen=True)
class Measured:
    source: str
    run: str
    config: RunConfig
    tokens_per_s: float  # per GPU
    peak_gib: float | None
    fit: bool
    before: bool = False  # see `Setting`


@dataclass(frozen=True)
class Compared:
    """A row with its forecast."""

    row: Measured
    tokens_per_s: float
    peak_gib: float

    @property
    def speed_ratio(self) -> float:
        return self.tokens_per_s / self.row.tokens_per_s

    @property
    def peak_ratio(self) -> float | None:
        return None if self.row.peak_gib is None else self.peak_gib / self.row.peak_gib


@cache
def measured_rows() -> tuple[Measured, ...]:
    rows = []
    for table in yaml.safe_load(ROWS.read_text()):
        for row in table["rows"]:
            config = compose([*table["base"].split(), *row["run"].split()], "bench")
            speed, peak = float(row["tokens_per_s"]), row.get("peak_gib")
            rows.append(
                Measured(
                    table["from"], row["run"], config, speed, peak, row.get("fit", False), table.get("before", False)
                )
            )
    return tuple(rows)


def forecast_row(hardware: Hardware, row: Measured) -> Compared:
    bench = row.config.bench
    assert bench is not None
    assert isinstance(bench.doc_len, int)
    setting = Setting(hardware, row.config, (bench.doc_len,), row.before)
    step_s = (micro_batch(setting) + step_end(setting)).seconds + optimizer_step(setting).total
    return Compared(row, setting.tokens / step_s, peak_memory(setting).total / GIB)


def compare(hardware: Hardware) -> list[Compared]:
    return [forecast_row(hardware, row) for row in measured_rows()]


def held_out_error(compared: Iterable[Compared]) -> float:
    """Of the rows that were not fitted."""
    return error_of([c for c in compared if not c.row.fit])


def error_of(compared: Iterable[Compared]) -> float:
    """What COVERED of the rows do not exceed: |ln(forecast / measured)| of tokens/s."""
    errors = sorted(abs(math.log(c.speed_ratio)) for c in compared)
    return errors[math.ceil(COVERED * len(errors)) - 1]


def spread(ratios: Iterable[float]) -> tuple[float, float]:
    """(geometric mean, geometric standard deviation about 1) of ratios."""
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(statistics.fmean(logs)), math.exp(math.sqrt(statistics.fmean(x * x for x in logs)))


# --- fitting ----------------------------------------------------------------------------------------------------------


def fit(hardware: Hardware, fitted: Collection[Measured]) -> Constants:
    """Coordinate descent on the squared logarithms of the ratios of tokens/s, over some rows alone; then the reserve,
    the median of what their peaks lack.
    """
    found = {name: getattr(hardware.constants, name) for name in FITTED}

    def with_(changes: Mapping[str, float]) -> Hardware:
        return hardware.model_copy(update={"constants": hardware.constants.model_copy(update=dict(changes))})

    def misfit(values: Mapping[str, float]) -> float:
        card = with_(values)
        return sum(math.log(forecast_row(card, row).speed_ratio) ** 2 for row in fitted)

    best, factor = misfit(found), 1.3
    while factor > 1.003:
        tried = [{**found, name: found[name] * f} for name in FITTED for f in (factor, 1 / factor)]
        misfits = [misfit(values) for values in tried]
        if min(misfits) < best:
            best, found = min(misfits), tried[misfits.index(min(misfits))]
        else:
            factor = math.sqrt(factor)
    bare = with_({**found, "reserve_gib": 0.0})
    peaks = [(forecast_row(bare, row).peak_gib, row.peak_gib) for row in fitted]
    found["reserve_gib"] = max(0.0, statistics.median(seen - counted for counted, seen in peaks if seen is not None))
    return with_(found).constants


def redrawn(hardware: Hardware, draws: int) -> Iterator[tuple[float, float]]:
    """The same with as many rows drawn at random, from constants that say nothing: (geometric standard deviation of the
    others' ratios about 1, what COVERED of them do not exceed) of each draw.
    """
    nothing = hardware.constants.model_copy(update=dict.fromkeys(FITTED, 1.0))
    rows = measured_rows()
    for draw in range(draws):
        fitted = random.Random(draw).sample(rows, sum(row.fit for row in rows))
        card = hardware.model_copy(update={"constants": nothing})
        card = card.model_copy(update={"constants": fit(card, fitted)})
        others = [forecast_row(card, row) for row in rows if row not in fitted]
        yield spread(c.speed_ratio for c in others)[1], math.exp(error_of(others))


# --- for people -------------------------------------------------------------------------------------------------------


def table(compared: Iterable[Compared]) -> list[str]:
    """In Markdown."""
    lines = [HEADER]
    for c in compared:
        row, peak = c.row, ("", "", "")
        if row.peak_gib is not None and c.peak_ratio is not None:
            peak = (f"{row.peak_gib:g}", f"{c.peak_gib:.1f}", f"{c.peak_ratio:.2f}")
        speed = (f"{row.tokens_per_s:,.0f}", f"{c.tokens_per_s:,.0f}", f"{c.speed_ratio:.2f}")
        lines.append(f"| {'fit' if row.fit else ''} | {shortened(row.run)} | " + " | ".join((*speed, *peak)) + " |")
    return lines


def shortened(run: str) -> str:
    """Overrides without the names of their groups."""
    for group in ("memory_recipe.", "model.card.", "parallelism.", "model.", "bench."):
        run = run.replace(f" {group}", " ").removeprefix(group)
    return run


def summary(compared: Iterable[Compared]) -> list[str]:
    lines = []
    compared = list(compared)
    for name, of_fit in (("fitted", True), ("held out", False)):
        rows = [c for c in compared if c.row.fit is of_fit]
        mean, deviation = spread(c.speed_ratio for c in rows)
        worst = max((c.speed_ratio for c in rows), key=lambda ratio: abs(math.log(ratio)))
        lines.append(f"{len(rows)} rows {name}: tokens/s {mean:.3f}, spread {deviation:.3f}, worst {worst:.2f}")
        peaks = [c.peak_ratio for c in rows if c.peak_ratio is not None]
        mean, deviation = spread(peaks)
        worst = max(peaks, key=lambda ratio: abs(math.log(ratio)))
        lines.append(f"{len(peaks)} of them with peaks: {mean:.3f}, spread {deviation:.3f}, worst {worst:.2f}")
    error = held_out_error(compared)
    return [*lines, f"{COVERED:.0%} of the held-out rows are within a factor of {math.exp(error):.3f} (ln {error:.3f})"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m prl.forecast.validation")
    parser.add_argument("--fit", action="store_true", help="find the constants of the hardware card")
    parser.add_argument("--draws", type=a_count_or_0, default=0, help="fit to so many other choices of rows")
    hardware, arguments = load_hardware(), parser.parse_args()
    if arguments.fit:
        found = fit(hardware, [row for row in measured_rows() if row.fit])
        print("\n".join(f"  {name}: {getattr(found, name):.3g}" for name in (*FITTED, "reserve_gib")))
        return
    if arguments.draws:
        for deviation, factor in redrawn(hardware, arguments.draws):
            print(f"spread {deviation:.3f}, {COVERED:.0%} within a factor of {factor:.3f}", flush=True)
        return
    compared = compare(hardware)
    print("\n".join([*table(compared), "", *summary(compared)]))


if __name__ == "__main__":
    main()
