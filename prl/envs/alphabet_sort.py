"""Keep a growing list of words in alphabetical order, turn after turn. The built-in multi-turn environment."""

from __future__ import annotations

from prl.envs.corpus import sentences
from prl.envs.protocol import Chat, ChatEnded, Environment, Message, Split, Task, assistant, user
from prl.envs.splits import draw_tasks


class AlphabetSort(Environment):
    """Each turn brings words; the reply must hold all words so far, sorted, separated by spaces.

    Words come from real English sentences. The reward is the mean over turns of the share of positions that are
    right. A conversation cut short is scored over all its turns.
    """

    def __init__(self, turns: int = 2, words_per_turn: int = 2, num_tasks: int = 2048, seed: int = 0) -> None:
        if turns < 1 or words_per_turn < 1:
            raise ValueError(f"turns and words_per_turn must be at least 1, got {turns} and {words_per_turn}")
        self.turns, self.words_per_turn, self.num_tasks, self.seed = turns, words_per_turn, num_tasks, seed

    def tasks(self, split: Split) -> list[Task]:
        words = sorted({w for s in sentences() for w in s.lower().split() if w.isalpha() and 2 <= len(w) <= 6})
        size = self.turns * self.words_per_turn
        if size > len(words):
            raise ValueError(f"turns * words_per_turn is {size}, but there are {len(words)} words")
        return draw_tasks(lambda rng: self._task(rng.sample(words, size)), self.num_tasks, split, self.seed)

    def _task(self, words: list[str]) -> tuple[str, Task]:
        turns = [words[i : i + self.words_per_turn] for i in range(0, len(words), self.words_per_turn)]
        answers = [sorted(word for turn in turns[: i + 1] for word in turn) for i in range(len(turns))]
        return " ".join(sorted(words)), Task("", (user(" ".join(turns[0])),), {"turns": turns, "answers": answers})

    async def rollout(self, task: Task, chat: Chat) -> None:
        try:
            for words in task.info["turns"]:
                await chat.reply(user(" ".join(words)))
        except ChatEnded:  # scored on what was said
            pass

    def reward(self, task: Task, messages: list[Message]) -> float:
        replies = [m["content"].split() for m in messages if m["role"] == "assistant"]
        scores = [
            sum(a == b for a, b in zip(answer, reply, strict=False)) / max(len(answer), len(reply))
            for answer, reply in zip(task.info["answers"], replies, strict=False)
        ]
        return sum(scores) / len(task.info["answers"])

    def demonstration(self, task: Task) -> list[Message]:
        talk = zip(task.info["turns"], task.info["answers"], strict=True)
        return [m for words, answer in talk for m in (user(" ".join(words)), assistant(" ".join(answer)))]
