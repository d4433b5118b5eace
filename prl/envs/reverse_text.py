"""Write the text backwards. The default environment: real English in, one turn, a graded reward."""

from __future__ import annotations

import random
import string
from difflib import SequenceMatcher

from prl.envs.corpus import excerpts
from prl.envs.protocol import Environment, Message, Split, Task, assistant, user


class ReverseText(Environment):
    """Excerpts of English sentences of min_chars to max_chars characters, to be reversed character by character.

    The reward is the similarity of reply and reversed text, 2 * matches / total length, as difflib.SequenceMatcher
    counts it (1: equal). "train" and "held_out" come from different sentences.

    Demonstrations are those of a careless writer: each character is, with probability typo_rate, a random letter
    instead. A model that imitates them samples such errors too; the reward is what teaches it not to.
    """

    def __init__(self, min_chars: int = 6, max_chars: int = 16, typo_rate: float = 0.0) -> None:
        if not 0 < min_chars <= max_chars:
            raise ValueError(f"need 0 < min_chars <= max_chars, got {min_chars} and {max_chars}")
        if not 0 <= typo_rate <= 1:
            raise ValueError(f"typo_rate is a probability, got {typo_rate}")
        self.min_chars, self.max_chars, self.typo_rate = min_chars, max_chars, typo_rate

    def tasks(self, split: Split) -> list[Task]:
        texts = excerpts(split, self.min_chars, self.max_chars)
        return [Task(f"{split}/{i}", (user(text),), {"answer": text[::-1]}) for i, text in enumerate(texts)]

    def reward(self, task: Task, messages: list[Message]) -> float:
        return SequenceMatcher(None, messages[-1]["content"], task.info["answer"], autojunk=False).ratio()

    def demonstration(self, task: Task) -> list[Message]:
        rng = random.Random(task.id)
        letters = string.ascii_lowercase + " "
        written = [rng.choice(letters) if rng.random() < self.typo_rate else char for char in task.info["answer"]]
        return [*task.prompt, assistant("".join(written))]
