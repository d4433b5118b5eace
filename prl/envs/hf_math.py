"""Mathematics problems from a Hugging Face dataset, verified by the library math-verify."""

from __future__ import annotations

from typing import Any

from prl.config.errors import UserError
from prl.config.hub import load_rows, why_not
from prl.config.packages import MATH_VERIFY
from prl.envs.protocol import Environment, Message, Split, Task, user

INSTRUCTION = "\n\nReason step by step, and put the final answer within \\boxed{}."


class HuggingFaceMath(Environment):
    """Problems and reference answers from two columns of a dataset; reward 1 if the reply's final answer is equivalent.

    `dataset` is whatever `datasets.load_dataset` takes (a hub name, or "json" with `load_args={"data_files": ...}`).
    Without an own held-out split, the last `held_out_fraction` of `split` is held out. Equivalence is decided by
    math-verify (https://github.com/huggingface/Math-Verify), which parses LaTeX and plain expressions.
    """

    def __init__(
        self,
        dataset: str,
        question_key: str = "problem",
        answer_key: str = "answer",
        split: str = "train",
        held_out_split: str | None = None,
        held_out_fraction: float = 0.05,
        instruction: str = INSTRUCTION,
        load_args: dict[str, Any] | None = None,
    ) -> None:
        self.dataset, self.question_key, self.answer_key = dataset, question_key, answer_key
        self.split, self.held_out_split, self.held_out_fraction = split, held_out_split, held_out_fraction
        self.instruction, self.load_args = instruction, load_args or {}
        try:
            import datasets  # noqa: F401
            import math_verify  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"environment hf_math needs the package {error.name}",
                where="env.mix.<name>.id=hf_math",
                fix=MATH_VERIFY.install,
            ) from error

    def tasks(self, split: Split) -> list[Task]:
        if self.held_out_split is not None:
            return self._read(self.split if split == "train" else self.held_out_split, split)
        everything = self._read(self.split, split)
        cut = len(everything) - max(1, round(len(everything) * self.held_out_fraction))
        return everything[:cut] if split == "train" else everything[cut:]

    def _read(self, dataset_split: str, split: Split) -> list[Task]:
        try:
            rows = load_rows(self.dataset, dataset_split, self.load_args)
        except Exception as error:  # datasets and the hub client raise many unrelated types for "not there"
            why, fix = why_not(error, self.dataset, "dataset")
            raise UserError(
                f"dataset {self.dataset!r} (split {dataset_split!r}) could not be loaded",
                where=f"env.mix.<name>.args.dataset={self.dataset}",
                why=why,
                fix=f"{fix}; or args.dataset=json with args.load_args.data_files=/path.jsonl",
            ) from error
        missing = {self.question_key, self.answer_key} - set(rows.column_names)
        if missing:
            raise UserError(
                f"dataset {self.dataset!r} has no column {', '.join(sorted(missing))}",
                where="env.mix.<name>.args",
                why=f"its columns are {', '.join(rows.column_names)}",
                fix="set args.question_key and args.answer_key",
            )
        return [
            Task(
                f"{split}/{i}",
                (user(str(row[self.question_key]) + self.instruction),),
                {"answer": str(row[self.answer_key])},
            )
            for i, row in enumerate(rows)
        ]

    def reward(self, task: Task, messages: list[Message]) -> float:
        from math_verify import parse, verify

        # math-verify's own time-outs use SIGALRM, which only works in a main thread; the worker bounds the time instead
        answer = task.info["answer"]
        gold = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$", parsing_timeout=None)
        reply = parse(messages[-1]["content"], parsing_timeout=None)
        return float(verify(gold, reply, timeout_seconds=None))
