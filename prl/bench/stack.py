"""A whole RL run, summarised from what it wrote: how fast each side is, and how long it waits for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prl.metrics.reader import Row, read_rows
from prl.runtime.people.report import is_number, merge_rows


def summarise_run(run_dir: Path, warmup_steps: int) -> dict[str, Any]:
    """Rates and shares of the wall time from the end of the warm-up to the end of the last step.

    Training steps follow each other, but the batches of an asynchronous run come in bursts; so sums over wall time, and
    no medians of the steps' own rates.
    """
    rows = merge_rows(read_rows(run_dir, "orchestrator"), rename(read_rows(run_dir, "trainer/0")))
    held_out = held_out_rewards(rows)
    rows = [row for row in rows if row["step"] > warmup_steps and "trainer_step_s" in row]
    wall_s = rows[-1]["trainer_time"] - (rows[0]["trainer_time"] - rows[0]["trainer_step_s"])

    def total(key: str) -> float:
        return sum(row[key] for row in rows if is_number(row.get(key)))

    busy_s = total("trainer_forward_backward_s") + total("trainer_optim_s")
    generated = sum(row.get("rollouts", 0) * row.get("completion_tokens", 0.0) for row in rows)
    return {
        "steps": len(rows),
        "wall_s": wall_s,
        "trained_tokens_per_s": total("trainer_tokens") / wall_s,
        "trained_tokens_per_busy_s": total("trainer_tokens") / busy_s,
        "generated_tokens_per_s": generated / wall_s,
        "trainer_waits_for_batch_share": total("trainer_wait_for_batch_s") / wall_s,
        "trainer_publishes_share": total("trainer_publish_s") / wall_s,
        "overlap": total("overlap") / len(rows),
        "mfu_while_busy": total("trainer_mfu") / len(rows),
        "peak_memory_bytes": max(row["trainer_peak_memory_bytes"] for row in rows),
        "held_out": held_out,
        "per_step": rows,
    }


def held_out_rewards(rows: list[Row]) -> list[tuple[int, float, float]]:
    """(step, seconds from the beginning of the first step until it was evaluated, reward)."""
    first = next(row for row in rows if "trainer_step_s" in row)
    began = first["trainer_time"] - first["trainer_step_s"]
    return [(row["step"], max(0.0, row["time"] - began), row["eval/reward"]) for row in rows if "eval/reward" in row]


def rename(rows: list[Row]) -> list[Row]:
    """The trainer's keys with its name before them: both sides have `tokens_per_s`."""
    return [{"step": row["step"], **{f"trainer_{key}": row[key] for key in row if key != "step"}} for row in rows]
