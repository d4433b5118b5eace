"""Times by phase, memory peaks, and their summary over steps and ranks."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from prl.trainer.moments import Moment, now, seconds, wait_for

PHASES = ("forward_backward", "clip_optimizer")


@dataclass
class StepRecord:
    """One step of one rank."""

    phases_s: dict[str, float] = field(default_factory=dict)
    useful_tokens: float = 0.0  # of this rank: a context group's tokens are divided among its ranks
    padded_tokens: float = 0.0  # what the rows could hold
    flops: float = 0.0
    loss: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.phases_s.values())


class Stopwatch:
    """Laps of one step, from one moment of the device to the next. It is idle when they begin."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.record = StepRecord()
        wait_for(device)
        self.last = now(device)

    def lap(self, phase: str, end: Moment | None = None) -> None:
        """end: of the phase, a moment that was noted; None: now."""
        end = now(self.device) if end is None else end
        self.record.phases_s[phase] = seconds(self.last, end)
        self.last = end


class MemoryWatch:
    """Peaks of the whole time and of the measured steps. On CPU the resident set, whose peak only grows."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before: dict[str, int] = {"allocated": 0, "reserved": 0}
        if device.type == "cuda":
            torch.cuda.init()  # without a context there are no statistics to reset
            torch.cuda.reset_peak_memory_stats(device)

    def read(self) -> dict[str, int]:
        if self.device.type == "cuda":
            return {
                "allocated": torch.cuda.max_memory_allocated(self.device),
                "reserved": torch.cuda.max_memory_reserved(self.device),
            }
        resident = host_peak_bytes()
        return {"allocated": resident, "reserved": resident}

    def end_warmup(self) -> None:
        self.before = self.read()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def summary(self) -> dict[str, int]:
        """Bytes: peaks of the measured steps, of everything, and the host's."""
        now = self.read()
        return {
            "peak_allocated_bytes": now["allocated"],
            "peak_reserved_bytes": now["reserved"],
            "overall_peak_allocated_bytes": max(now["allocated"], self.before["allocated"]),
            "overall_peak_reserved_bytes": max(now["reserved"], self.before["reserved"]),
            "host_peak_bytes": host_peak_bytes(),
        }


def host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rank_report(records: list[StepRecord], memory: MemoryWatch) -> dict[str, Any]:
    """What one rank hands to `summarise_ranks`."""
    return {"steps": [asdict(record) for record in records], "memory": memory.summary()}


def summarise_ranks(ranks: list[dict[str, Any]], peak: float, formula: str) -> dict[str, Any]:
    """Figures per GPU over all ranks: a step lasts as long as on its slowest rank.

    Args:
        ranks: their `rank_report`s.
        peak: FLOP/s of one device.
        formula: where FLOPs and peak are from.
    """
    world, count = len(ranks), len(ranks[0]["steps"])
    columns = [[rank["steps"][i] for rank in ranks] for i in range(count)]
    phases = {name: [max(step["phases_s"][name] for step in column) for column in columns] for name in PHASES}
    step_s = [max(sum(step["phases_s"].values()) for step in column) for column in columns]

    def per_gpu_second(key: str) -> float:
        return statistics.median(
            sum(s[key] for s in column) / world / t for column, t in zip(columns, step_s, strict=True)
        )

    flops_per_s = per_gpu_second("flops")
    memory = [rank["memory"] for rank in ranks]
    return {
        "ranks": world,
        "steps": count,
        "tokens_per_step": statistics.mean(sum(s["useful_tokens"] for s in column) for column in columns),
        "tokens_per_s_per_gpu": per_gpu_second("useful_tokens"),
        "padded_tokens_per_s_per_gpu": per_gpu_second("padded_tokens"),
        "step_s": spread(step_s),
        "phases_s": {name: spread(values) for name, values in phases.items()},
        "model_flops_per_s_per_gpu": flops_per_s,
        "mfu": flops_per_s / peak,
        "mfu_formula": formula,
        "loss": [sum(s["loss"] for s in column) for column in columns],
        **{key: max(m[key] for m in memory) for key in memory[0]},
        "per_rank": ranks,
    }


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def time_mean(work: Callable[[], Any], device: torch.device, repeats: int, warm_up: int = 3) -> float:
    """Milliseconds of one call; the host runs ahead, as in training."""
    for _ in range(warm_up):
        work()
    wait_for(device)
    start_s = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return (time.perf_counter() - start_s) / repeats * 1e3
