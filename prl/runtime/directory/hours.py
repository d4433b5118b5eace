"""RUN/hours.json: what each attempt of a run costs, from the moment its machines were its own until they are released.

The root of the run is the only writer. It rewrites the file every few seconds, so that of an attempt that is killed all
but the last moments are known. What agents tell in attempts.jsonl completes it: attempts that never got as far.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prl.config.console import one_line
from prl.runtime.directory.files import read_object, replace_file
from prl.runtime.directory.identity import job_name, seconds_since_start
from prl.runtime.directory.phases import END, PHASES, START, STEPS, UNTOLD, Phases
from prl.runtime.directory.shapes import is_number
from prl.runtime.directory.status_file import FINAL_STATES, read_attempts, read_status

HOURS = "hours.json"
SUMMARY = "paid"  # begins the keys of a wandb run's summary
BEAT_S = 5.0
_ended_before = 0.0  # when this process has ended a run: the next one is not charged for it


@dataclass
class Attempt:
    """`seconds` of all phases sum up to the time from `began` to `updated` (Unix seconds). Where `is_over` is false and
    nobody runs any more, it was killed, and may have cost more than is known.
    """

    number: int
    job: str | None
    devices: float | None  # that were paid for; of SLURM, what the job was given
    began: float
    updated: float
    is_over: bool
    seconds: dict[str, float]

    @property
    def paid_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def device_hours(self) -> float:
        return self.paid_s * (self.devices or 0) / 3600

    def go_on(self, until: float, phase: str) -> None:
        """It is known to have lasted until then, too."""
        if until > self.updated:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + until - self.updated
            self.updated = until


class Hours:
    """The one writer, for one attempt."""

    def __init__(self, run_dir: Path, devices: int, is_ours: Callable[[], bool], own_job: bool = False) -> None:
        """
        Args:
            devices: of the plan. A job of this run's own may have been given more, and pays for them.
            own_job: whether the SLURM job around exists for this run alone, so that it pays from the job's start.
        """
        self.path, self.is_ours = run_dir / HOURS, is_ours
        self.before: list[dict[str, Any]] = []
        began = _paid_since(own_job)
        job, devices = (job_name(), allocated_devices() or devices) if own_job else (None, devices)
        self.attempt = Attempt(0, job, devices, began, began, False, {})
        self.phases = Phases(began)
        self.written_s = -math.inf

    def begin(self, number: int) -> None:
        """The attempt has its number; only what has begun is written."""
        found = (read_object(self.path) or {}).get("attempts")
        self.before = [row for row in found if _read(row) is not None] if isinstance(found, list) else []
        self.before = [row for row in self.before if row["number"] < number]
        self.attempt.number = number
        self.beat()

    def enter(self, stage: str) -> None:
        self.phases.enter(stage, time.time())
        self.written_s = -math.inf
        self.beat()

    def roles_end(self) -> None:
        """Of the job, or of its warm start, which has no parts."""
        if self.phases.has_steps:
            self.enter(END)

    def beat(self) -> None:
        """Call as often as convenient."""
        if self.attempt.number and time.monotonic() - self.written_s >= BEAT_S:
            self._write(self.phases.at(time.time()))

    def close(self) -> None:
        """All is over: the caller is about to leave."""
        global _ended_before
        if self.attempt.number:
            now = max(time.time(), self.phases.since)
            if self.phases.has_steps:
                self.phases.enter(END, now)
            self.attempt.is_over = True
            self._write(self.phases.at(now))
            self.attempt.number = 0
        _ended_before = time.time()

    def _write(self, seconds: dict[str, float]) -> None:
        self.written_s = time.monotonic()
        self.attempt.seconds = {phase: told for phase, spent in seconds.items() if (told := round(spent, 3))}
        self.attempt.updated = self.attempt.began + sum(seconds.values())
        if self.is_ours():
            with contextlib.suppress(OSError):  # a full disk costs the numbers, and no run
                text = json.dumps({"attempts": [*self.before, asdict(self.attempt)]}, indent=1) + "\n"
                replace_file(self.path, text, sync=self.attempt.is_over)


def _paid_since(own_job: bool) -> float:
    """When this attempt's machines became its own: the start of its SLURM job, or of this process; Unix seconds."""
    began = max(time.time() - seconds_since_start(), _ended_before)
    with contextlib.suppress(ValueError):
        job_began = float(os.environ.get("SLURM_JOB_START_TIME", "")) if own_job else began
        began = min(began, job_began) if job_began > 0 else began
    return began


def allocated_devices() -> int | None:
    """GPUs of the SLURM job around, on all its nodes; None without such a job, or without GPUs."""
    with contextlib.suppress(ValueError):
        nodes = int(os.environ.get("SLURM_JOB_NUM_NODES", "1"))
        return int(os.environ.get("SLURM_GPUS_ON_NODE", "")) * nodes or None
    return None


# --- reading ----------------------------------------------------------------------------------------------------------


def read_hours(run_dir: Path, devices: int | None) -> list[Attempt]:
    """All attempts of a run in their order; empty where nothing was recorded.

    Args:
        devices: of the plan, for attempts that never got so far as to record theirs.
    """
    found = (read_object(run_dir / HOURS) or {}).get("attempts")
    rows = map(_read, found) if isinstance(found, list) else ()
    attempts = {attempt.number: attempt for attempt in rows if attempt is not None}
    for row in read_attempts(run_dir):
        began, ended = row.get("started"), row.get("ended")
        if not isinstance(began, int | float):
            continue
        if row["attempt"] not in attempts:
            attempts[row["attempt"]] = Attempt(
                row["attempt"], row.get("job") and one_line(row["job"]), devices, began, began, False, {}
            )
        if isinstance(ended, int | float):
            attempt = attempts[row["attempt"]]
            attempt.go_on(ended, END if attempt.seconds else UNTOLD)
            attempt.is_over = True
    ordered = [attempts[number] for number in sorted(attempts)]
    if ordered and not ordered[-1].is_over:
        _add_last_signs(run_dir, ordered[-1])
    return ordered


def _add_last_signs(run_dir: Path, attempt: Attempt) -> None:
    """Of the attempt that came last: its status and its processes' beats may be newer than what it has written."""
    status = read_status(run_dir)
    signs = [status.get("updated", 0.0)] if status.get("attempt") == attempt.number else []
    with contextlib.suppress(OSError):
        signs += [path.stat().st_mtime for path in (run_dir / "heartbeat").iterdir()]
    phase = next((phase for phase in (END, STEPS) if phase in attempt.seconds), START if attempt.seconds else UNTOLD)
    attempt.go_on(max(signs, default=0.0), phase)


def is_killed(attempt: Attempt, is_last: bool, state: str) -> bool:
    """Whether nobody has told the end of an attempt that is none under way: what it has cost is at least that much."""
    return not attempt.is_over and (not is_last or state in (*FINAL_STATES, "lost"))


def totals(attempts: list[Attempt]) -> dict[str, float]:
    """Seconds of each phase that took any, over all attempts."""
    summed = {phase: sum(attempt.seconds.get(phase, 0.0) for attempt in attempts) for phase in PHASES}
    return {phase: seconds for phase, seconds in summed.items() if seconds}


def summarise(run_dir: Path) -> dict[str, float]:
    """For the summary of a wandb run: what all attempts have cost so far, in all and by phase. Never the last word."""
    attempts = read_hours(run_dir, None)
    seconds = {f"{SUMMARY}/{phase}_s": round(spent, 3) for phase, spent in totals(attempts).items()}
    return {f"{SUMMARY}/gpu_hours": sum(attempt.device_hours for attempt in attempts), **seconds} if attempts else {}


def _read(row: Any) -> Attempt | None:
    """None for what is no record of an attempt."""
    try:
        attempt = Attempt(**row)
        numbers = [attempt.number, attempt.began, attempt.updated, *attempt.seconds.values()]
    except (TypeError, AttributeError):
        return None
    if attempt.devices is not None:
        numbers.append(attempt.devices)
    is_one = isinstance(attempt.number, int) and isinstance(attempt.is_over, bool) and all(map(is_number, numbers))
    attempt.job = attempt.job and one_line(attempt.job)
    return attempt if is_one and attempt.seconds.keys() <= set(PHASES) else None
