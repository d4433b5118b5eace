"""What a running job says about itself, taken from the metrics files: the numbers of the progress display."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from prl.metrics.alarms import Alarms
from prl.metrics.reader import Row, Tail
from prl.metrics.writer import MetricsWriter, metrics_path
from prl.planning.run_plan import RunPlan

RATE_WINDOW = 20  # steps over which the time left is estimated
SHOWN = {  # job -> metrics key -> (label, format)
    "rl": {
        "reward": ("reward", "{:.3f}"),
        "eval/reward": ("held-out", "{:.3f}"),
        "staleness_mean": ("staleness", "{:.2f}"),
        "tokens_per_s": ("tokens/s", "{:.0f}"),
    },
    "eval": {"eval/reward": ("held-out", "{:.3f}")},
    "sft": {
        "loss": ("loss", "{:.4f}"),
        "val_loss": ("val loss", "{:.4f}"),
        "tokens_per_s": ("tokens/s", "{:.0f}"),
    },
}


@dataclass
class RunView:
    """Newest optimizer step of one job and its numbers. `poll` reads what has been appended since.

    The orchestrator reports a batch when it is complete, which is before it is trained; its numbers wait until then.
    """

    plan: RunPlan
    run_dir: Path
    step: int = 0
    numbers: dict[str, float] = field(default_factory=dict)
    observe: Callable[[str, Row], None] = lambda role, row: None  # is given each row of the trainer and orchestrator
    ahead: dict[int, dict[str, float]] = field(default_factory=dict)  # numbers of batches that are not trained yet
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RATE_WINDOW))

    def __post_init__(self) -> None:
        self.alarms = Alarms(self.plan.config)
        self.told: list[str] = []  # of alarms and of engines that are not the run's own, for who draws
        self.lost_engines: dict[str, str] = {}  # URL of one that is left out -> why
        self.began_s = time.time()
        self.begun_with = self.step
        self.trainer = Tail(metrics_path(self.run_dir, "trainer/0"))
        self.orchestrator = Tail(metrics_path(self.run_dir, "orchestrator"))
        self.max_steps = self.plan.config.max_steps

    def poll(self) -> bool:
        """Whether a new step has ended."""
        before = self.step
        trained = self.trainer.poll()  # read first: the numbers of these batches are reported by now
        if self.plan.config.job == "rl":
            for row in self.orchestrator.poll():
                self._take("orchestrator", row)
                shown = self._shown(row)
                shown.pop("tokens_per_s", None)  # between two batches, of which several may come in one breath
                self.ahead.setdefault(_step_of(row), {}).update(shown)
        if self.plan.config.job == "eval":
            for row in self.orchestrator.poll():
                self.numbers |= self._shown(row)
                self.step = self.max_steps if "eval/reward" in row else self.step  # its one step is the evaluation
        for row in trained:
            self._take("trainer", row)
            if self.plan.config.job in ("rl", "sft"):
                self.numbers |= self._shown(row)
            if _step_of(row) > self.step and isinstance(row.get("time"), int | float):
                self.step = _step_of(row)
                self.recent.append((row["time"], self.step))
        for step in sorted(step for step in self.ahead if step <= self.step):
            self.numbers |= self.ahead.pop(step)
        return self.step > before

    def _take(self, role: str, row: Row) -> None:
        self.observe(role, row)
        self._take_engine(row)
        told = self.alarms.observe(role, row)
        if told and self.alarms.step > self.begun_with:  # else an earlier attempt has told it
            self.told += told
            with contextlib.closing(MetricsWriter(self.run_dir, "alarms")) as writer:
                writer.log(step=self.alarms.step, **self.alarms.numbers())

    def _take_engine(self, row: Row) -> None:
        """What the orchestrator says of an engine of inference.urls; what it said to an earlier attempt is over."""
        url, why, at = row.get("engine"), row.get("engine_lost"), row.get("time")
        if not (isinstance(url, str) and isinstance(why, str) and isinstance(at, int | float) and at > self.began_s):
            return
        if why and self.lost_engines.get(url) != why:
            self.lost_engines[url] = why
            self.told.append(f"{url} is left out: {why}")
        elif not why and self.lost_engines.pop(url, None) is not None:
            self.told.append(f"{url} serves again")

    def take_told(self) -> list[str]:
        """Lines about alarms and engines that nobody has been told yet."""
        told, self.told = self.told, []
        return told

    def _shown(self, row: Row) -> dict[str, float]:
        keys = SHOWN.get(self.plan.config.job, {})
        return {key: row[key] for key in keys if isinstance(row.get(key), int | float)}

    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None before there is one."""
        if len(self.recent) < 2:
            return None
        (first_s, first), (last_s, last) = self.recent[0], self.recent[-1]
        pace = (last_s - first_s) / max(1, last - first)
        return max(0.0, (self.max_steps - last) * pace - (time.time() - last_s))

    def cells(self) -> list[tuple[str, str]]:
        """(label, value) pairs for display."""
        shown = SHOWN.get(self.plan.config.job, {})
        cells = [(label, form.format(self.numbers[key])) for key, (label, form) in shown.items() if key in self.numbers]
        left = self.seconds_left()
        cells += [("left", clock(left))] if left is not None else []
        cells += [("engines left out", str(len(self.lost_engines)))] if self.lost_engines else []
        return cells + ([("alarms", ", ".join(self.alarms.active))] if self.alarms.active else [])


def _step_of(row: Row) -> int:
    """0 for a row that has none: somebody else may have written into the file."""
    return step if isinstance(step := row.get("step"), int) else 0


def clock(seconds: float) -> str:
    """75 -> "1:15"; 3700 -> "1:01:40"."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
