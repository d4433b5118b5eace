"""Which replica gets a request."""

from __future__ import annotations

from collections.abc import Sequence

from prl.config.schema import RouterConfig
from prl.inference.router.prefixes import Key, PrefixTable


class Policy:
    """Prefix-affine while loads are balanced, else least loaded; or in turns.

    Load is the number of requests in flight. Attributes:
        matched, blocks: of all prompts, how many blocks the chosen replica had seen, and how many there were.
    """

    def __init__(self, config: RouterConfig) -> None:
        self.config = config
        self.table = PrefixTable()
        self.turns = 0
        self.last_turn: dict[int, int] = {}  # of a replica
        self.matched = self.blocks = 0

    def choose(self, keys: Sequence[Key], loads: dict[int, int]) -> int:
        """A replica of `loads` (replica -> requests in flight; at least one) for a prompt with these keys."""
        if self.config.policy == "round_robin":
            choice = min(loads, key=lambda replica: (self.last_turn.get(replica, 0), replica))
        else:
            count, holders = self.table.match(keys, loads)
            idlest = self._idlest(loads, loads)
            choice = self._idlest(holders, loads) if count and self._decides(count, keys) else idlest
            if self._is_overloaded(loads[choice], loads[idlest]):
                choice = idlest
        self.matched += self.table.match(keys, [choice])[0]
        self.blocks += len(keys)
        self.turns += 1
        self.last_turn[choice] = self.turns
        self.table.record(keys, choice)
        return choice

    def forget(self, replica: int) -> None:
        """Its cache is gone."""
        self.table.forget(replica)

    def _decides(self, count: int, keys: Sequence[Key]) -> bool:
        """Whether enough of the prompt is known: a system prompt that all share must not send all to one place."""
        return count > self.config.cache_threshold * len(keys)

    def _idlest(self, replicas: set[int] | dict[int, int], loads: dict[int, int]) -> int:
        return min(replicas, key=lambda replica: (loads[replica], self.last_turn.get(replica, 0), replica))

    def _is_overloaded(self, load: int, least: int) -> bool:
        config = self.config
        return load - least > config.balance_abs_threshold and load > least * config.balance_rel_threshold
