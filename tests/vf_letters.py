"""Environments as users of `verifiers` write them: the package's classes, a small dataset, `load_environment`."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def small_letters(completion) -> float:
    """Share of small letters in the last reply."""
    text = completion[-1]["content"]
    return sum(char.islower() for char in text) / max(len(text), 1)


async def length(completion) -> float:
    return float(len(completion[-1]["content"]))


def dataset(num_rows=40) -> Dataset:
    return Dataset.from_list([{"question": f"letters {i}", "answer": str(i)} for i in range(num_rows)])


def load_environment(num_rows: int = 40) -> vf.Environment:
    """One turn, no data for evaluation."""
    rubric = vf.Rubric(funcs=[small_letters, length], weights=[1.0, 0.0])
    return vf.SingleTurnEnv(dataset=dataset(num_rows), rubric=rubric)


class Words(vf.MultiTurnEnv):
    """Asks for more after the first reply."""

    def __init__(self, forgetful=False, **kwargs) -> None:
        super().__init__(max_turns=2, **kwargs)
        self.forgetful = forgetful

    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "more"}]

    async def get_prompt_messages(self, state):
        messages = await super().get_prompt_messages(state)
        if self.forgetful and state["trajectory"]:  # as environments do that sum up what was said
            said = messages[-2]["content"]
            return [messages[0], vf.UserMessage(content=f"you said {len(said)} characters")]
        return messages


def load_words(forgetful: bool = False) -> vf.Environment:
    rubric = vf.Rubric(funcs=[small_letters])
    return Words(forgetful, dataset=dataset(), eval_dataset=dataset(4), rubric=rubric, system_prompt="Letters.")


class Faulty(Words):
    """Goes wrong in one of the ways that environments do."""

    def __init__(self, fault, **kwargs) -> None:
        super().__init__(**kwargs)
        self.fault = fault

    async def setup_state(self, state):
        if self.fault == "setup":
            raise vf.SandboxError("no sandbox left")
        if self.fault == "sampling":
            state["sampling_args"] = {"temperature": 0.3}
        return state

    async def env_response(self, messages, state, **kwargs):
        if self.fault == "turn":
            raise LookupError("no such turn")
        if self.fault == "image":
            return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
        return await super().env_response(messages, state)


def load_faulty(fault: str) -> vf.Environment:
    def score(completion) -> float:
        if fault == "reward":
            raise ZeroDivisionError("rewards divide by zero")
        return float("nan") if fault == "nan" else 1.0

    return Faulty(fault, dataset=dataset(), rubric=vf.Rubric(funcs=[score]))


def load_group() -> vf.Environment:
    def best_of(completions) -> list[float]:
        return [1.0 for _ in completions]

    return vf.SingleTurnEnv(dataset=dataset(), rubric=vf.Rubric(funcs=[best_of]))


def load_eval_only() -> vf.Environment:
    return vf.SingleTurnEnv(eval_dataset=dataset(), rubric=vf.Rubric(funcs=[small_letters]))


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


def load_tools() -> vf.Environment:
    return vf.ToolEnv(tools=[add], dataset=dataset(), rubric=vf.Rubric(funcs=[small_letters]))
