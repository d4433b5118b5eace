"""Moments of a step as the device comes to them: the host need not wait at each to know how long a phase took."""

from __future__ import annotations

import time

import torch

Moment = float | torch.cuda.Event


def now(device: torch.device) -> Moment:
    """When the device is done with what it was asked so far."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds(start: Moment, end: Moment) -> float:
    """Waits for the later one."""
    if isinstance(start, torch.cuda.Event):
        assert isinstance(end, torch.cuda.Event)
        end.synchronize()
        return start.elapsed_time(end) / 1e3
    assert isinstance(end, float)
    return end - start


def wait_for(device: torch.device) -> None:
    """Until the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
