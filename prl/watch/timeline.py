"""Who did what when in one optimizer step, role by role, from the seconds that roles write with their rows."""

from __future__ import annotations

from typing import Any

from prl.metrics.reader import Row

TRAINER_PHASES = (  # one behind the other, as the trainer's loop has them
    ("wait_for_batch_s", "waits for a batch"),
    ("forward_backward_s", "forward, backward"),
    ("optim_s", "optimizer"),
    ("publish_s", "publishes weights"),
    ("save_s", "checkpoint"),
)
Span = tuple[float, float, str]  # begin and end in unix seconds, what


def timeline(timed: dict[str, list[Row]], step: int | None) -> dict[str, Any]:
    """Rows of spans in the time of one step of trainer/0, in seconds from its beginning.

    Args:
        step: None: the newest.
    """
    steps = {row["step"]: row for row in timed.get("trainer.0", []) if "step_s" in row}
    if not steps:
        return {"step": None, "steps": [], "rows": []}
    step = step if step in steps else max(steps)
    end, length = float(steps[step]["time"]), float(steps[step]["step_s"])
    begin = end - length
    rows = []
    for role in sorted(timed):
        for name, spans in _spans(role, timed[role]).items():
            cut = [(max(a, begin) - begin, min(b, end) - begin, what) for a, b, what in spans if b > begin and a < end]
            if cut:
                rows.append({"role": name, "spans": [(round(a, 4), round(b, 4), what) for a, b, what in sorted(cut)]})
    return {"step": step, "steps": [min(steps), max(steps)], "seconds": length, "rows": rows}


def _spans(role: str, rows: list[Row]) -> dict[str, list[Span]]:
    if role.startswith("trainer"):
        return {role.replace(".", "/"): [span for row in rows if "step_s" in row for span in _trainer(row)]}
    if role != "orchestrator":
        return {}
    batches: list[Span] = []
    engines: list[Span] = []
    updates: list[Span] = []
    for row in rows:
        end = float(row["time"])
        if "wait_for_rollouts_s" in row:
            batches.append((end - row["wait_for_rollouts_s"], end, "waits for rollouts"))
        if "trainer_busy_s" in row and row.get("wait_for_trainer_s"):
            taken = end - row["trainer_busy_s"]
            batches.append((taken - row["wait_for_trainer_s"], taken, "a batch waits for the trainer"))
        if "eval_s" in row:
            updates.append((end - row["eval_s"], end, "evaluates"))
        if "weight_update_s" in row:
            updates.append((end - row["weight_update_s"], end, "takes new weights"))
        engines += [(a, b, "generates") for a, b in row.get("generating_spans", [])]
    return {"orchestrator": batches, "engines": engines, "engines: weights, evaluation": updates}


def _trainer(row: Row) -> list[Span]:
    at = float(row["time"]) - float(row["step_s"])
    spans = []
    for key, what in TRAINER_PHASES:
        seconds = float(row.get(key) or 0.0)
        if seconds > 0:
            spans.append((at, at + seconds, what))
        at += seconds
    return spans
