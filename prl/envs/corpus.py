"""Real English that every Python installation carries: the help texts of `pydoc_data.topics`."""

from __future__ import annotations

import random
import re
from functools import cache


@cache
def sentences() -> tuple[str, ...]:
    """Distinct prose sentences of CPython's help topics, printable ASCII, in a fixed order.

    Code, tables, grammar and headings are left out: a sentence starts with a capital letter, ends with a full stop and
    holds mostly words. The texts differ slightly between Python versions.
    """
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            if re.search(r"^\s{4,}|[|<>{}=*]|::|--", paragraph, re.MULTILINE):
                continue
            text = " ".join(paragraph.split())
            for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z])", text):
                if re.fullmatch(r"[A-Z][ -~]*[a-z\)\"]\.", sentence) and sentence.count(" ") >= 1:
                    found[sentence] = None
    return tuple(found)


def excerpts(split: str, min_chars: int, max_chars: int, held_out_fraction: float = 0.15, seed: int = 0) -> list[str]:
    """Runs of whole words from the sentences of one split, each of min_chars to max_chars characters.

    A sentence longer than max_chars gives several excerpts, cut at word borders, one after another. The split
    ("train" or "held_out") is decided per sentence by a shuffle with `seed`. An excerpt that also occurs in a held-out
    sentence is left out of "train".
    """
    order = list(sentences())
    random.Random(seed).shuffle(order)
    cut = int(len(order) * held_out_fraction)
    held_out = _cut_sentences(order[:cut], min_chars, max_chars)
    if split == "held_out":
        return list(held_out)
    return [piece for piece in _cut_sentences(order[cut:], min_chars, max_chars) if piece not in held_out]


def _cut_sentences(chosen: list[str], min_chars: int, max_chars: int) -> dict[str, None]:
    """Their distinct excerpts in order of appearance, as a dict's keys."""
    found: dict[str, None] = {}
    for sentence in chosen:
        piece = ""
        for word in sentence.split(" "):
            longer = f"{piece} {word}" if piece else word
            if len(longer) > max_chars:
                if min_chars <= len(piece) <= max_chars:
                    found[piece] = None
                piece = word
            else:
                piece = longer
        if min_chars <= len(piece) <= max_chars:
            found[piece] = None
    return found
