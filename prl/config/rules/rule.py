"""What a rule is, and what rules share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prl.config.errors import UserError
from prl.config.schema import RunConfig
from prl.config.world import World, closest, divisors

Rule = Callable[[RunConfig, World], Iterator[UserError]]


def next_divisor(wanted: int, number: int) -> int:
    """The divisor of `number` next to `wanted`."""
    return closest(wanted, divisors(number))
