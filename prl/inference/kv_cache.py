"""A KV cache of slots, one per running sequence; slots that became free stay reusable as prefix cache."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prl.config.schema import ModelCard

BLOCK = 8  # tokens; prefixes are found in whole blocks

# what a prefix is filed under: weight version and cache salt. KV of other weights or other salts is never found.
Namespace = tuple[str, str]


@dataclass
class _Content:
    """What lies in a slot that nobody runs in, or the prompt of the one who does."""

    namespace: Namespace
    token_ids: list[int]
    hashes: list[int] = field(default_factory=list)


class KVCache:
    """k and v are [L, slots, Hkv, max_len, D]."""

    def __init__(self, card: ModelCard, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = (card.num_hidden_layers, slots, card.num_key_value_heads, max_len, card.head_dim)
        self.dtype, self.device = dtype, device
        self.slots = slots
        self.allocate()

    def allocate(self) -> None:
        self.k = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.v = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.reset()

    def release(self) -> None:
        """Give the memory back (sleep). All content is lost."""
        self.k = self.v = torch.empty(0)
        self.reset()

    def reset(self) -> None:
        """Forget all reusable prefixes. Slots in use must have been given back before, or stay in use."""
        in_use = getattr(self, "in_use", set())
        self.empty = [slot for slot in range(self.slots) if slot not in in_use]  # heap: lowest index first
        self.in_use: set[int] = in_use
        self.cached: dict[int, None] = {}  # free slots with content, least recently used first
        self.content: dict[int, _Content] = {}
        self.blocks: dict[int, int] = {}  # hash of a prefix of whole blocks -> a slot that holds it

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.cached)

    def bytes(self) -> int:
        return 2 * self.k.numel() * self.k.element_size()

    # --- slots --------------------------------------------------------------------------------------------------------

    def take(self, keep: int = -1) -> int:
        """A free slot: an empty one of lowest index, else the least recently used cached one other than `keep` if possible."""
        if self.empty:
            slot = heapq.heappop(self.empty)
        else:
            slot = next((s for s in self.cached if s != keep), keep)
            del self.cached[slot]
        self.in_use.add(slot)
        return slot

    def give_back(self, slot: int, namespace: Namespace, token_ids: list[int], cacheable: bool) -> None:
        """Free a slot whose KV covers token_ids."""
        self.in_use.discard(slot)
        self._forget(slot)
        if cacheable and len(token_ids) >= BLOCK:
            self.file(slot, namespace, token_ids)
            self.cached[slot] = None
        else:
            heapq.heappush(self.empty, slot)

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def file(self, slot: int, namespace: Namespace, token_ids: list[int]) -> None:
        """Make what a slot holds findable."""
        self._forget(slot)
        content = _Content(namespace, token_ids, _chain(namespace, token_ids))
        self.content[slot] = content
        for value in content.hashes:
            self.blocks[value] = slot

    def find(self, namespace: Namespace, token_ids: list[int]) -> tuple[int, int]:
        """(slot, tokens) of the longest filed prefix of token_ids, in whole blocks; (-1, 0) if there is none."""
        for value, end in reversed(list(zip(_chain(namespace, token_ids), range(BLOCK, len(token_ids) + 1, BLOCK)))):
            slot = self.blocks.get(value, -1)
            if slot < 0:
                continue
            content = self.content[slot]
            if content.namespace == namespace and content.token_ids[:end] == token_ids[:end]:  # no trust in hashes alone
                return slot, end
        return -1, 0

    def touch(self, slot: int) -> None:
        if slot in self.cached:
            self.cached[slot] = self.cached.pop(slot)

    def copy(self, source: int, target: int, tokens: int) -> None:
        self.k[:, target, :, :tokens] = self.k[:, source, :, :tokens]
        self.v[:, target, :, :tokens] = self.v[:, source, :, :tokens]

    def _forget(self, slot: int) -> None:
        self.cached.pop(slot, None)
        if content := self.content.pop(slot, None):
            for value in content.hashes:
                if self.blocks.get(value) == slot:
                    del self.blocks[value]

    # --- attention ----------------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, Hkv, D] of tokens at (slot, position), both [N] int64."""
        self.k[layer][slots, :, positions] = k
        self.v[layer][slots, :, positions] = v


def _chain(namespace: Namespace, token_ids: list[int]) -> list[int]:
    """Hash of every prefix of whole blocks, each built on the one before."""
    value, values = hash(namespace), []
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        value = hash((value, *token_ids[end - BLOCK : end]))
        values.append(value)
    return values
