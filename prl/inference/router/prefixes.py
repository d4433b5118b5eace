"""Which replica has seen which prompt prefixes. Pure and bounded; a wrong answer costs a prefill, never a result."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

BLOCK_TOKENS = 16  # vLLM's KV block; the built-in engine's is 8
BLOCK_CHARS = 4 * BLOCK_TOKENS  # a token of English is about four characters
CAPACITY = 1 << 18  # blocks remembered: prompts of 4 million tokens, some 40 MB

Key = int


def prompt_keys(body: dict[str, Any]) -> list[Key]:
    """One key for each whole block of a request's prompt, each standing for everything up to it.

    Prompts are `token_ids`, `messages` or `prompt`, as the three generating routes have them; of a list of prompts the
    first. Requests of another cache_salt or model share no KV, hence no keys. Empty for what has no prompt.
    """
    pieces: Iterable[object]
    prompt = body.get("token_ids") or body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (list, str)):
        prompt = prompt[0]
    if isinstance(prompt, list):
        pieces = (tuple(block) for block in _blocks(prompt, BLOCK_TOKENS))
    else:
        text = prompt if isinstance(prompt, str) else _conversation(body)
        pieces = _blocks(text, BLOCK_CHARS)
    key = hash((str(body.get("cache_salt")), str(body.get("model"))))
    keys = []
    try:
        for piece in pieces:
            key = hash((key, piece))
            keys.append(key)
    except TypeError:  # "tokens" that are objects; the engine will say so
        return []
    return keys


def _conversation(body: dict[str, Any]) -> str:
    """Text that grows at its end when a turn is added. Tools come first, as in chat templates."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return ""
    tools = json.dumps(body["tools"], sort_keys=True) if body.get("tools") else ""
    return tools + "".join(json.dumps(message, sort_keys=True) for message in messages)


def _blocks(whole: Sequence[Any], size: int) -> Iterable[Any]:
    return (whole[start : start + size] for start in range(0, len(whole) - size + 1, size))


class PrefixTable:
    """Key -> the replicas that have seen it, least recently used ones forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity = capacity
        self.seen: OrderedDict[Key, int] = OrderedDict()  # bit r: replica r has seen it; 150 bytes, with a set 360

    def match(self, keys: Sequence[Key], among: Iterable[int]) -> tuple[int, set[int]]:
        """The number of leading keys that some replica of `among` has seen all of, and who has; (0, none) if nobody."""
        among = set(among)
        holders, count = sum(1 << replica for replica in among), 0
        for key in keys:
            still = holders & self.seen.get(key, 0)
            if not still:
                break
            holders, count = still, count + 1
        return (count, {replica for replica in among if holders >> replica & 1}) if count else (0, set())

    def record(self, keys: Sequence[Key], replica: int) -> None:
        """The replica has seen these keys now."""
        for key in reversed(keys):  # so that a prefix outlives what only extends it
            self.seen[key] = self.seen.get(key, 0) | 1 << replica
            self.seen.move_to_end(key)
        while len(self.seen) > self.capacity:
            self.seen.popitem(last=False)

    def forget(self, replica: int) -> None:
        """The replica's cache is gone."""
        for key in [key for key, holders in self.seen.items() if holders >> replica & 1]:
            self.seen[key] &= ~(1 << replica)
            if not self.seen[key]:
                del self.seen[key]
