"""The layers of a card as parts, those that are alike once; and how many weights they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod

from prl.config.schema import ModelCard
from prl.forecast.attention import attention_parts
from prl.forecast.parts import Part, expert_parts, mlp_parts, state_parts
from prl.forecast.setting import Setting

SHARING = "+"  # attention to what a layer before it chose
MAKERS: Mapping[str, Callable[[Setting], Iterator[Part]]] = {
    "M": state_parts, "*": attention_parts, SHARING: partial(attention_parts, chooses=False), "E": expert_parts,
    "-": mlp_parts,
}  # fmt: skip
DECIDE = ("route", "choice")  # parts whose matrices choose something: Muon leaves them to AdamW


@dataclass(frozen=True)
class Layer:
    parts: tuple[Part, ...]

    @cached_property
    def experts(self) -> int:
        """Parameters of stacked experts, all of them."""
        return sum(prod(shape) for part in self.parts for shape in part.weights if is_stack(shape))

    @cached_property
    def dense(self) -> int:
        """All others."""
        return sum(prod(shape) for part in self.parts for shape in part.weights) - self.experts

    @cached_property
    def matrices(self) -> list[tuple[int, ...]]:
        """Those that Muon has."""
        parts = [part for part in self.parts if part.name not in DECIDE]
        return [shape for part in parts for shape in part.weights if len(shape) == 2]


def is_stack(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] > 1


def letters_of(card: ModelCard) -> list[str]:
    """What each layer is made of, in order: as in `hybrid_override_pattern`."""
    if card.hybrid_override_pattern:
        return list(card.hybrid_override_pattern)
    dense, sharing = set(card.dense_layers), set(card.shared_index_layers)
    return [(SHARING if i in sharing else "*") + ("-" if i in dense else "E") for i in range(card.num_hidden_layers)]


def layers_in_order(setting: Setting) -> list[Layer]:
    made: dict[str, Layer] = {}
    letters = letters_of(setting.card)
    for kind in letters:
        if kind not in made:
            made[kind] = Layer(tuple(part for letter in kind for part in MAKERS[letter](setting)))
    return [made[kind] for kind in letters]


def layers_of(setting: Setting) -> list[tuple[int, Layer]]:
    """(how many, what they are made of), each kind once."""
    layers = layers_in_order(setting)
    counted = Counter(id(layer) for layer in layers)
    return [(counted[key], layer) for key, layer in {id(layer): layer for layer in layers}.items()]


def root_weights(card: ModelCard) -> int:
    """Embedding and head, one where they are tied, and the last norm."""
    return card.vocab_size * card.hidden_size * (1 if card.tie_word_embeddings else 2) + card.hidden_size


def end_weights(setting: Setting) -> int:
    """Of embedding or head, where FSDP has each as a unit; 0 where the root has both and stays gathered
    (prl/trainer/parallelize.py).
    """
    card = setting.card
    apart = card.is_native and setting.config.model.impl != "hf" and not card.tie_word_embeddings
    return card.vocab_size * card.hidden_size if apart else 0
