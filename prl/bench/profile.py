"""One step under torch.profiler: what the device was busy with, what was hidden, and what bounds the step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

Interval = tuple[float, float]  # start and end, microseconds

# first match wins; names of CUDA kernels and, on CPU, of operators
GROUPS = {
    "communication": r"nccl|all_?to_?all|all_?gather|reduce_?scatter|all_?reduce|c10d|gloo|deep_?ep|FSDP::",
    "attention": r"flash|fmha|attention|sdpa|cudnn.*(fprop|bprop|sdpa)|varlen",
    "GEMM": r"gemm|nvjet|cutlass|cublas|xmma|_mm\b|::mm|addmm|bmm|matmul|linear|dot|grouped_mm|sm90_.*tensorop",
    "optimizer": r"multi_tensor|adam|foreach|optimizer|fused_adam|lpnorm|_norm_foreach",
    "copies": r"memcpy|memset|copy_|::to\b|_to_copy|CatArray|contiguous|split_with_sizes_copy|chunk_cat",
    "softmax and loss": r"softmax|nll_loss|log_softmax|cross_entropy",
    "elementwise": r"",
}
TOP = 12


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name, re.IGNORECASE))


def profile_step(step: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Run one step and account for its time.

    Shares are of the time from the first to the last activity. A group's `exposed` share is when nothing else ran
    beside it; on CPU, where operators nest, shares are of the operators' own time and nothing is idle.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with profile(activities=activities) as prof:
        step()
    if device.type == "cuda":
        return _account_intervals(_kernels(prof))
    return _account_operators(prof)


def _kernels(prof: profile) -> list[tuple[str, Interval]]:
    on_device = torch.autograd.DeviceType.CUDA
    return [
        (event.name, (event.time_range.start, event.time_range.end))
        for event in prof.events()
        if event.device_type == on_device and not event.is_user_annotation
    ]


def _account_intervals(kernels: list[tuple[str, Interval]]) -> dict[str, Any]:
    by_group: dict[str, list[Interval]] = defaultdict(list)
    by_name: dict[str, list[float]] = defaultdict(list)
    for name, interval in kernels:
        by_group[group_of(name)].append(interval)
        by_name[name].append(interval[1] - interval[0])
    everything = [interval for _, interval in kernels]
    span = max(end for _, end in everything) - min(start for start, _ in everything)
    busy = covered(everything)
    groups = {}
    for group, intervals in by_group.items():
        others = [i for other, list_ in by_group.items() if other != group for i in list_]
        groups[group] = {"share": covered(intervals) / span, "exposed": (busy - covered(others)) / span}
    return _verdict(groups, 1 - busy / span, span * 1e-6, by_name)


def _account_operators(prof: profile) -> dict[str, Any]:
    by_name = {
        event.key: [event.self_cpu_time_total / event.count] * event.count
        for event in prof.key_averages()
        if event.self_cpu_time_total > 0
    }
    total = sum(sum(times) for times in by_name.values())
    groups: dict[str, dict[str, float]] = {}
    for name, times in by_name.items():
        entry = groups.setdefault(group_of(name), {"share": 0.0, "exposed": 0.0})
        entry["share"] += sum(times) / total
        entry["exposed"] += sum(times) / total
    return _verdict(groups, 0.0, total * 1e-6, by_name)


def _verdict(
    groups: dict[str, dict[str, float]], idle: float, seconds: float, by_name: dict[str, list[float]]
) -> dict[str, Any]:
    ordered = dict(sorted(groups.items(), key=lambda item: -item[1]["exposed"]))
    first = next(iter(ordered))
    bound = f"{first} ({ordered[first]['exposed']:.0%} of the step)"
    if idle > ordered[first]["exposed"]:
        bound = f"the host: the device waits {idle:.0%} of the step"
    totals = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "seconds": seconds,
        "idle": idle,
        "groups": ordered,
        "bound_by": bound,
        "top": [
            {"name": name[:100], "group": group_of(name), "calls": len(times), "share": sum(times) * 1e-6 / seconds}
            for name, times in totals
        ],
    }


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
