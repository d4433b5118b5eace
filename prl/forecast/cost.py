"""What a piece of work costs: seconds by the rate that bounds it, bytes by the link over which they go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

K = TypeVar("K")
NVLINK, NIC, HOST = "NVLink", "NIC", "host link"
LINK_RATES = ("nvlink_all_to_all", "nvlink_ring", "nic")  # of collectives


@dataclass(frozen=True)
class Cost:
    """seconds: rate of the hardware card -> s. traffic: (what for, link) -> bytes that one GPU sends."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    traffic: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        return Cost(_sum(self.seconds, other.seconds), _sum(self.traffic, other.traffic))

    def __mul__(self, times: float) -> Cost:
        seconds = {name: value * times for name, value in self.seconds.items()}
        return Cost(seconds, {name: value * times for name, value in self.traffic.items()})

    @property
    def total(self) -> float:
        """Seconds, one thing after another."""
        return sum(self.seconds.values())

    @property
    def on_links(self) -> float:
        """Seconds of collectives."""
        return sum(self.seconds.get(name, 0.0) for name in LINK_RATES)


NOTHING = Cost()


def total(costs: Iterable[Cost]) -> Cost:
    result = NOTHING
    for cost in costs:
        result += cost
    return result


def _sum(first: Mapping[K, float], second: Mapping[K, float]) -> dict[K, float]:
    return {key: first.get(key, 0.0) + second.get(key, 0.0) for key in {**first, **second}}
