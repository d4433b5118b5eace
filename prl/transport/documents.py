"""Training sequences, and those that begin alike put next to each other: the trainer runs what they share once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from prl.transport.kept import KeptTokens

LEAST = 8  # tokens in common that are worth a document's queries and keys in places of their own
SMALL = 4  # parts of a row: larger items are hard to place, and made where they share much only


@dataclass
class Document:
    """One training sequence, aligned as in `prl.transport.batch`."""

    input_ids: Sequence[int] | np.ndarray
    loss_mask: Sequence[bool] | np.ndarray
    logp_infer: Sequence[float] | np.ndarray
    advantages: Sequence[float] | np.ndarray
    versions: Sequence[int] | np.ndarray
    routed_experts: list[np.ndarray] | None = None  # [some tokens, L, K] uint8 or uint16 each, T together
    kept: KeptTokens | None = None  # of truncated sampling

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Item:
    """Documents that are packed together, by their indices, each with the number of its first tokens that it has in
    common with the one before it.
    """

    documents: tuple[int, ...]
    shared: tuple[int, ...]
    tokens: int  # that are run, or trained where these are more: each of them has logits of its own

    def pairs(self) -> Iterator[tuple[int, int]]:
        return zip(self.documents, self.shared, strict=True)


def items_of(documents: list[Document], seq_len: int, share: bool) -> list[Item]:
    """Each document in one item; what an item runs fits into a row, if its documents do. Deterministic.

    Raises ValueError for a document longer than seq_len: cutting it is the caller's decision.
    """
    for index, document in enumerate(documents):
        if len(document) > seq_len:
            raise ValueError(f"document {index} has {len(document)} tokens, more than seq_len={seq_len}")
    if not share:
        return [Item((index,), (0,), len(document)) for index, document in enumerate(documents)]
    return list(_together(documents, seq_len))


def _together(documents: list[Document], seq_len: int) -> Iterator[Item]:
    """In the order of their tokens, so that each has more in common with its neighbours than with others."""
    ids = [np.asarray(document.input_ids) for document in documents]
    order = sorted(range(len(ids)), key=lambda i: (ids[i].astype(">u4").tobytes(), i))
    item: list[int] = []
    shared: list[int] = []
    run = trained = 0
    for index in order:
        length, common = len(documents[index]), 0
        loss_tokens = int(np.count_nonzero(documents[index].loss_mask))
        if item:
            common = alike(documents[item[-1]], documents[index])
        grown = max(run + length - common, trained + loss_tokens)
        is_small = grown <= seq_len // SMALL or 2 * common >= length
        if common >= LEAST and grown <= seq_len and is_small:
            item.append(index)
            shared.append(common)
            run, trained = run + length - common, trained + loss_tokens
            continue
        if item:
            yield Item(tuple(item), tuple(shared), max(run, trained))
        item, shared, run, trained = [index], [0], length, loss_tokens
    if item:
        yield Item(tuple(item), tuple(shared), max(run, trained))


def alike(one: Document, other: Document) -> int:
    """How many first tokens two documents have in common: the same tokens, sent to the same experts if that is told."""
    most = min(len(one), len(other))
    count = _equal(np.asarray(one.input_ids)[:most], np.asarray(other.input_ids)[:most])
    if one.routed_experts is None or other.routed_experts is None or not count:
        return count
    return min(count, _equal(*(_first(document.routed_experts or [], count) for document in (one, other))))


def _first(pieces: list[np.ndarray], count: int) -> np.ndarray:
    """The first `count` of [some, L, K] each."""
    found: list[np.ndarray] = []
    for piece in pieces:
        if count <= 0:
            break
        found.append(piece[:count])
        count -= len(piece)
    return np.concatenate(found) if len(found) != 1 else found[0]


def _equal(one: np.ndarray, other: np.ndarray) -> int:
    """Rows from the first one on that are the same."""
    differ = one != other
    if differ.ndim > 1:
        differ = differ.reshape(len(differ), -1).any(axis=1)
    return int(differ.argmax()) if differ.any() else len(differ)
