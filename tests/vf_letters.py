"""An environment as users of `verifiers` write it: the package's classes, a small dataset, `load_environment`."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def small_letters(completion) -> float:
    """Share of small letters in the reply."""
    text = completion[-1]["content"]
    return sum(char.islower() for char in text) / max(len(text), 1)


async def length(completion) -> float:
    return float(len(completion[-1]["content"]))


def load_environment(num_rows: int = 40, bonus: float = 0.0) -> vf.Environment:
    rows = [{"question": f"letters {i}", "answer": str(i)} for i in range(num_rows)]
    rubric = vf.Rubric(funcs=[small_letters, length], weights=[1.0, bonus])
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=rubric)
