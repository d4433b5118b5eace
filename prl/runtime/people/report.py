"""The end of a run: a table, a curve as PNG, and where everything lies."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from prl.config.console import one_line
from prl.metrics.reader import Row, read_rows
from prl.planning.run_plan import RunPlan
from prl.runtime.directory.checkpoints import steps
from prl.runtime.directory.status_file import read_status
from prl.runtime.people.evaluation_report import print_evaluation
from prl.runtime.people.view import clock

CURVE = {"rl": ("orchestrator", "reward", "eval/reward", "reward"), "sft": ("trainer/0", "loss", "val_loss", "loss")}
LABELS = {"reward": "reward (training)", "eval/reward": "held-out reward", "loss": "loss", "val_loss": "held-out loss"}
TABLE_COLUMNS = {  # metrics key -> heading
    "rl": {
        "reward": "reward",
        "eval/reward": "held-out",
        "teacher_kl": "teacher KL",
        "staleness_mean": "staleness",
        "completion_tokens": "tokens/rollout",
        "mismatch_kl_mean": "mismatch KL",
        "entropy": "entropy",
        "grad_norm": "grad norm",
        "tokens_per_s": "tokens/s",
        "mfu": "MFU",
    },
    "sft": {
        "loss": "loss",
        "val_loss": "held-out loss",
        "lr": "lr",
        "grad_norm": "grad norm",
        "tokens_per_s": "tokens/s",
        "mfu": "MFU",
    },
}
TABLE_ROWS = 10
PLAIN_WIDTH = 160  # characters


def print_report(plan: RunPlan, run_dir: Path) -> None:
    """Print the final table, write the curve, and say where things are."""
    from rich.console import Console

    job = plan.config.job
    if job == "eval":
        print_evaluation(run_dir)
    if job not in CURVE:
        return
    role, training, held_out, stem = CURVE[job]
    # the trainer's last: tokens/s are those that it trains on. The orchestrator's are sampled between two batches, and
    # where engines are ahead several batches come in one breath: 0 at one step, 100,000 at the next
    rows = merge_rows(read_rows(run_dir, role), read_rows(run_dir, "trainer/0"))
    console = Console()
    if not console.is_terminal:  # else it would be folded to 80 columns
        console = Console(width=PLAIN_WIDTH)
    console.print(_table(job, rows))
    points = [(row["step"], row[held_out]) for row in rows if is_number(row.get(held_out))]
    if points:
        (first_step, first), (last_step, last) = points[0], points[-1]
        ends = [(first, first_step)] if first_step == last_step else [(first, first_step), (last, last_step)]
        print(f"{LABELS[held_out]}: {', '.join(f'{value:.3f} at step {step}' for value, step in ends)}")
    failed = [(row["eval/failed_rollouts"], row["step"]) for row in rows if row.get("eval/failed_rollouts")]
    if failed:
        told = _first([f"{count} at step {step}" for count, step in failed])
        print(f"held-out rollouts that failed, and count as nothing: {told}")
    overlaps = [row["overlap"] for row in rows if is_number(row.get("overlap"))]
    if overlaps:
        share = sum(overlaps) / len(overlaps)
        print(f"overlap: rollouts were being generated in {share:.0%} of the time in which the trainer trained")
    if skipped := [str(row["step"]) for row in rows if row.get("step_skipped")]:
        print(f"{len(skipped)} optimizer steps were skipped, being not finite: {_first(skipped)}")
    if rows:
        attempts = number if isinstance(number := read_status(run_dir).get("attempt"), int) else 1
        others = f", and what lay between {attempts} attempts" if attempts > 1 else ""
        print(f"time: {clock(rows[-1]['time'] - rows[0]['time'])} from the first row of metrics to the last{others}")
    curve = draw_curve(rows, training, held_out, run_dir / f"{stem}.png")
    for label, path in _places(run_dir, curve):
        print(one_line(f"{label:<12}{path}"))


def _first(words: list[str]) -> str:
    return ", ".join(words[:10]) + (" and more" if len(words) > 10 else "")


def merge_rows(*sources: list[Row]) -> list[Row]:
    """One row per step with the keys of all sources; a later source wins."""
    merged: dict[int, Row] = {}
    for row in (row for source in sources for row in source):
        if "step" in row:
            merged.setdefault(row["step"], {}).update(row)
    return [merged[step] for step in sorted(merged)]


def draw_curve(rows: list[Row], training: str, held_out: str, path: Path) -> Path | None:
    """Training and held-out series over steps as PNG; None if there is nothing to draw or no room for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.add_subplot()
    for key, style in ((training, "-"), (held_out, "o-")):
        points = [(row["step"], row[key]) for row in rows if is_number(row.get(key))]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=LABELS[key])
    if not axes.lines:
        return None
    axes.set_xlabel("optimizer step")
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except OSError:
        return None
    return path


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _table(job: str, rows: list[Row]) -> Any:
    from rich.table import Table

    columns = {key: head for key, head in TABLE_COLUMNS[job].items() if any(is_number(row.get(key)) for row in rows)}
    table = Table(box=None, pad_edge=False)
    for heading in ("step", *columns.values()):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in _thin([row for row in rows if any(is_number(row.get(key)) for key in columns)]):
        cells = (_format(row[key]) if is_number(row.get(key)) else "" for key in columns)
        table.add_row(str(row["step"]), *cells)
    return table


def _format(value: float) -> str:
    """Four digits, and no exponent where a person would write none."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _thin(rows: list[Row]) -> list[Row]:
    """At most TABLE_ROWS of them, evenly, first and last included."""
    if len(rows) <= TABLE_ROWS:
        return rows
    return [rows[round(i * (len(rows) - 1) / (TABLE_ROWS - 1))] for i in range(TABLE_ROWS)]


def _places(run_dir: Path, curve: Path | None) -> list[tuple[str, Path]]:
    places = [("run", run_dir), ("metrics", run_dir / "metrics"), ("logs", run_dir / "logs")]
    if curve is not None:
        places.append(("curve", curve))
    saved = steps(run_dir)
    if saved:
        places.append(("checkpoint", run_dir / "checkpoints" / f"step_{saved[-1]}"))
    if (run_dir / "export").is_dir():
        places.append(("export", run_dir / "export"))
    if (run_dir / "wandb").is_dir():
        places.append(("wandb", run_dir / "wandb"))
    return places
