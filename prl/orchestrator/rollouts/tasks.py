"""Which task a group works on: a pure function of the seed and the group's index, so that resuming needs no state."""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class TaskChoice:
    env: str
    index: int


class TaskSampler:
    """Weighted mix of environments; each environment's tasks are gone through in shuffled epochs, without
    repetition.
    """

    def __init__(self, counts: dict[str, int], weights: dict[str, float], seed: int) -> None:
        self.counts, self.seed = counts, seed
        self.names = sorted(counts)
        self.weights = [weights[name] for name in self.names]
        self.drawn: list[TaskChoice] = []
        self.used = dict.fromkeys(self.names, 0)
        self.orders: dict[tuple[str, int], list[int]] = {}

    def __getitem__(self, group_index: int) -> TaskChoice:
        while len(self.drawn) <= group_index:
            rng = random.Random(f"{self.seed}/env/{len(self.drawn)}")
            name = rng.choices(self.names, self.weights)[0]
            epoch, position = divmod(self.used[name], self.counts[name])
            self.used[name] += 1
            self.drawn.append(TaskChoice(name, self._order(name, epoch)[position]))
        return self.drawn[group_index]

    def _order(self, name: str, epoch: int) -> list[int]:
        if (name, epoch) not in self.orders:
            order = list(range(self.counts[name]))
            random.Random(f"{self.seed}/{name}/{epoch}").shuffle(order)
            self.orders = {key: value for key, value in self.orders.items() if key[0] != name}  # one epoch at a time
            self.orders[name, epoch] = order
        return self.orders[name, epoch]


def request_seed(*parts: object) -> int:
    """A 31-bit sampling seed from anything that identifies a request."""
    return int.from_bytes(hashlib.sha256("/".join(map(str, parts)).encode()).digest()[:4], "little") >> 1
