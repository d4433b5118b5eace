"""Who did what when in one optimizer step, role by role, from the seconds that roles write with their rows."""

from __future__ import annotations

from typing import Any

from prl.compare.curves import is_number
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
    """Rows of spans in the time of one step of trainer/0, in seconds from its beginning. What is no number in a row
    took no time.

    Args:
        step: None: the newest.

    Raises LookupError for a step that is not there.
    """
    timed = {role: [row for row in rows if is_number(row.get("time"))] for role, rows in timed.items()}
    steps = {row["step"]: row for row in timed.get("trainer.0", []) if is_number(row.get("step_s"))}
    if step is not None and step not in steps:
        there = f"there are {min(steps)} to {max(steps)}" if steps else "there is none yet"
        raise LookupError(f"step {step} is not there: {there}")
    if step is None:
        if not steps:
            return {"step": None, "steps": [], "rows": []}
        step = max(steps)
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
        return {
            role.replace(".", "/"): [span for row in rows if is_number(row.get("step_s")) for span in _trainer(row)]
        }
    if role != "orchestrator":
        return {}
    batches: list[Span] = []
    engines: list[Span] = []
    updates: list[Span] = []
    for row in rows:
        end = float(row["time"])
        if waited := _seconds(row, "wait_for_rollouts_s"):
            batches.append((end - waited, end, "waits for rollouts"))
        if waited := _seconds(row, "wait_for_trainer_s"):
            taken = end - _seconds(row, "trainer_busy_s")
            batches.append((taken - waited, taken, "a batch waits for the trainer"))
        if spent := _seconds(row, "eval_s"):
            updates.append((end - spent, end, "evaluates"))
        if spent := _seconds(row, "weight_update_s"):
            updates.append((end - spent, end, "takes new weights"))
        engines += [(a, b, "generates") for a, b in _pairs(row.get("generating_spans"))]
    return {"orchestrator": batches, "engines": engines, "engines: weights, evaluation": updates}


def _trainer(row: Row) -> list[Span]:
    at = float(row["time"]) - float(row["step_s"])
    spans = []
    for key, what in TRAINER_PHASES:
        seconds = _seconds(row, key)
        if seconds > 0:
            spans.append((at, at + seconds, what))
        at += seconds
    return spans


def _seconds(row: Row, key: str) -> float:
    value = row.get(key)
    return max(0.0, float(value)) if value is not None and is_number(value) else 0.0


def _pairs(value: Any) -> list[tuple[float, float]]:
    """Those of the list that are two numbers."""
    pairs = [one for one in value if isinstance(one, list) and len(one) == 2] if isinstance(value, list) else []
    return [(float(a), float(b)) for a, b in pairs if is_number(a) and is_number(b)]
