"""A KV cache of slots, one per running sequence; slots that became free stay reusable as prefix cache."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import torch
from torch import Tensor

from prl.config.schema import ModelCard
from prl.inference.states import StateCache

BLOCK = 8  # tokens; prefixes are found in whole blocks

# What a prefix is filed under: a number that changes when KV is to be forgotten, and the cache salt. KV of another one
# of either is never found.
Namespace = tuple[int, str]


@dataclass(frozen=True)
class _Content:
    """The tokens whose KV lies at the start of a slot."""

    namespace: Namespace
    token_ids: list[int]
    hashes: list[int]  # of each prefix of whole blocks


class KVCache:
    """k, v are [L, slots, Hkv, max_len, D]; of latent attention k is the latent and the shared key, one head, and v
    the part of it that is the latent. index [layers with an indexer, slots, max_len, J] are indexers' keys. A slot is
    empty, cached (free, with content) or in use. L are the layers with attention; `rows` says which one's keys lie
    where.

    Of layers with a state (`states`), a slot has the state after its last token alone, not after each. A prefix is
    found there only if it is all that the slot holds, and a slot that goes on is no longer found.
    """

    def __init__(self, card: ModelCard, slots: int, max_len: int, dtype: torch.dtype, device: torch.device) -> None:
        self.latent = card.kv_lora_rank  # 0: keys and values of their own
        heads, dim = card.num_key_value_heads, card.head_dim
        if self.latent:
            heads, dim = 1, card.kv_lora_rank + card.qk_rope_head_dim
        own = sorted(set(card.choosing_layers)) if card.index_topk else []
        self.index_rows = {layer: row for row, layer in enumerate(own)}  # layers with an indexer
        self.index_shape = (len(own), slots, max_len, card.index_head_dim)
        self.rows = {layer: row for row, layer in enumerate(card.attention_layers)}
        self.shape = (len(self.rows), slots, heads, max_len, dim)
        self.states = StateCache(card, slots, dtype, device) if card.state_layers else None
        self.block = 1 if self.states else BLOCK
        # whether one token a row is written and attended to by kernels (`decode_kernels`)
        self.by_kernels = device.type == "cuda" and not self.latent and dtype != torch.float64
        self.dtype, self.device, self.slots = dtype, device, slots
        self.in_use: set[int] = set()
        self.cached: dict[int, None] = {}  # least recently used first
        self.content: dict[int, _Content] = {}
        self.holders: dict[int, dict[int, None]] = {}  # hash of a prefix -> slots that hold it
        self.allocate()

    def allocate(self) -> None:
        self.k = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        self.v = self.k[..., : self.latent] if self.latent else torch.zeros_like(self.k)
        self.index = torch.zeros(self.index_shape, dtype=self.dtype, device=self.device)
        if self.states:
            self.states.allocate()
        self.reset()

    def release(self) -> None:
        """Give the memory back (sleep). No slot may be in use; all content is lost."""
        assert not self.in_use
        self.k = self.v = self.index = torch.empty(0, device=self.device)
        if self.states:
            self.states.release()
        self.reset()

    def reset(self) -> None:
        """Forget all prefixes. Slots in use stay in use."""
        self.cached.clear()
        self.content.clear()
        self.holders.clear()
        self.empty = [slot for slot in range(self.slots) if slot not in self.in_use]  # a heap: lowest index first

    def forget_unsalted(self) -> None:
        """Forget the prefixes of requests without a salt; slots that held them are empty."""
        for slot in [slot for slot, content in self.content.items() if not content.namespace[1]]:
            self._forget(slot)
            if slot in self.cached:
                del self.cached[slot]
                heapq.heappush(self.empty, slot)

    @property
    def num_free(self) -> int:
        return len(self.empty) + len(self.cached)

    # --- slots --------------------------------------------------------------------------------------------------------

    def take(self, keep: int = -1) -> int:
        """A free slot: the lowest empty one, else the least recently used cached one, `keep` only if there is no other.

        Its content is forgotten unless it is `keep`.
        """
        if self.empty:
            slot = heapq.heappop(self.empty)
        else:
            slot = next((s for s in self.cached if s != keep), keep)
            del self.cached[slot]
            if slot != keep:
                self._forget(slot)
        self.in_use.add(slot)
        return slot

    def give_back(self, slot: int, namespace: Namespace, token_ids: list[int], cacheable: bool) -> None:
        """Free a slot whose KV covers token_ids."""
        self.in_use.discard(slot)
        if cacheable and len(token_ids) >= BLOCK:
            self.file(slot, namespace, token_ids)
            self.cached[slot] = None
        else:
            self._forget(slot)
            heapq.heappush(self.empty, slot)

    def wipe(self, slot: int) -> None:
        """Zeros for what a slot in use holds: attention multiplies what it masks by nothing, and that of NaN is NaN."""
        self._forget(slot)
        self.k[:, slot] = 0
        self.v[:, slot] = 0
        self.index[:, slot] = 0
        if self.states:
            self.states.wipe(slot)

    # --- prefixes -----------------------------------------------------------------------------------------------------

    def file_running(self, slot: int, namespace: Namespace, token_ids: list[int]) -> None:
        """`file` for a slot to which tokens will be added."""
        if self.states:
            self._forget(slot)
        else:
            self.file(slot, namespace, token_ids)

    def file(self, slot: int, namespace: Namespace, token_ids: list[int]) -> None:
        """Make the tokens at the start of a slot findable, instead of what was there."""
        self._forget(slot)
        hashes = _chain(namespace, token_ids, self.block)
        content = _Content(namespace, token_ids, hashes[-1:] if self.states else hashes)
        self.content[slot] = content
        for value in content.hashes:
            self.holders.setdefault(value, {})[slot] = None

    def find(self, namespace: Namespace, token_ids: list[int]) -> tuple[int, int]:
        """(slot, tokens) of the longest filed prefix of token_ids, in whole blocks; (-1, 0) if there is none."""
        hashes = _chain(namespace, token_ids, self.block)
        for blocks in range(len(hashes), 0, -1):
            end = blocks * self.block
            for slot in self.holders.get(hashes[blocks - 1], ()):
                content = self.content[slot]  # compared in full, for hashes may collide
                held = content.token_ids if self.states else content.token_ids[:end]
                if content.namespace == namespace and held == token_ids[:end]:
                    return slot, end
        return -1, 0

    def touch(self, slot: int) -> None:
        """Mark a cached slot as used now."""
        if slot in self.cached:
            self.cached[slot] = self.cached.pop(slot)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """The KV of the first tokens of one slot to another; with states, of all its tokens."""
        if self.states:
            self.states.copy(source, target)
        self.k[:, target, :, :tokens] = self.k[:, source, :, :tokens]
        self.index[:, target, :tokens] = self.index[:, source, :tokens]
        if not self.latent:
            self.v[:, target, :, :tokens] = self.v[:, source, :, :tokens]

    def _forget(self, slot: int) -> None:
        content = self.content.pop(slot, None)
        for value in content.hashes if content else ():
            del self.holders[value][slot]
            if not self.holders[value]:
                del self.holders[value]

    # --- attention ----------------------------------------------------------------------------------------------------

    def write(self, layer: int, slots: Tensor, positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store k, v [N, Hkv, D] of tokens at (slot, position), both [N] int64."""
        row = self.rows[layer]
        self.k[row][slots, :, positions] = k
        if not self.latent:
            self.v[row][slots, :, positions] = v

    def of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, [slots, Hkv, max_len, D] each."""
        return self.k[self.rows[layer]], self.v[self.rows[layer]]


def _chain(namespace: Namespace, token_ids: list[int], block: int) -> list[int]:
    """Hash of every prefix of whole blocks, each built on the one before."""
    value, values = hash(namespace), []
    for end in range(block, len(token_ids) + 1, block):
        value = hash((value, *token_ids[end - block : end]))
        values.append(value)
    return values
