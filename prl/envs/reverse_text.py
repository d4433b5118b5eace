"""Write the text backwards. The default environment: real English in, one turn, a graded reward."""

from __future__ import annotations

from difflib import SequenceMatcher

from prl.envs.corpus import excerpts
from prl.envs.protocol import Environment, Message, Split, Task, assistant, user


class ReverseText(Environment):
    """Excerpts of English sentences of min_chars to max_chars characters, to be reversed character by character.

    The reward is the similarity of reply and reversed text, 2 * matches / total length, as difflib.SequenceMatcher counts it (1:
    equal). "train" and "held_out" come from different sentences.
    """

    def __init__(self, min_chars: int = 6, max_chars: int = 16) -> None:
        if not 0 < min_chars <= max_chars:
            raise ValueError(f"need 0 < min_chars <= max_chars, got {min_chars} and {max_chars}")
        self.min_chars, self.max_chars = min_chars, max_chars

    def tasks(self, split: Split) -> list[Task]:
        texts = excerpts(split, self.min_chars, self.max_chars)
        return [Task(f"{split}/{i}", (user(text),), {"answer": text[::-1]}) for i, text in enumerate(texts)]

    def reward(self, task: Task, messages: list[Message]) -> float:
        return SequenceMatcher(None, messages[-1]["content"], task.info["answer"], autojunk=False).ratio()

    def demonstration(self, task: Task) -> list[Message]:
        return [*task.prompt, assistant(task.info["answer"])]
