"""Countdown: reach a target number by arithmetic on the given numbers. Verified by evaluating the expression."""

from __future__ import annotations

import ast
import operator
import random
from collections import Counter
from fractions import Fraction

from prl.envs.protocol import Environment, Message, Split, Task, assistant, user
from prl.envs.splits import draw_tasks

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Countdown(Environment):
    """The prompt is like "3 7 5=26": write an expression over + - * / and parentheses, each number at most once.

    Reward 1 if it is worth the target, format_reward if it is a valid expression over the given numbers with another
    value, else 0. Every task is solvable, because its target is made from an expression.
    """

    def __init__(
        self, numbers: int = 3, largest: int = 9, num_tasks: int = 2048, format_reward: float = 0.1, seed: int = 0
    ) -> None:
        if numbers < 2 or largest < 1:
            raise ValueError(f"need at least 2 numbers, each at least 1, got numbers={numbers}, largest={largest}")
        self.numbers, self.largest, self.num_tasks = numbers, largest, num_tasks
        self.format_reward, self.seed = format_reward, seed

    def tasks(self, split: Split) -> list[Task]:
        return draw_tasks(self._draw, self.num_tasks, split, self.seed)

    def _draw(self, rng: random.Random) -> tuple[str, Task]:
        numbers = [rng.randint(1, self.largest) for _ in range(self.numbers)]
        solution, target = str(numbers[0]), numbers[0]
        for number in numbers[1:]:
            sign = rng.choice("+-*")
            solution = (
                f"({solution}){sign}{number}" if sign == "*" and len(solution) > 2 else f"{solution}{sign}{number}"
            )
            target = {"+": target + number, "-": target - number, "*": target * number}[sign]
        shown = rng.sample(numbers, len(numbers))
        prompt = f"{' '.join(map(str, shown))}={target}"
        task = Task("", (user(prompt),), {"numbers": numbers, "target": target, "solution": solution})
        return f"{sorted(numbers)}={target}", task

    def reward(self, task: Task, messages: list[Message]) -> float:
        try:
            value = evaluate(messages[-1]["content"].strip(), task.info["numbers"])
        except (ValueError, SyntaxError, ZeroDivisionError, RecursionError):
            return 0.0
        return 1.0 if value == task.info["target"] else self.format_reward

    def demonstration(self, task: Task) -> list[Message]:
        return [*task.prompt, assistant(task.info["solution"])]


def evaluate(expression: str, allowed: list[int]) -> Fraction:
    """Exact value of an arithmetic expression that uses each of `allowed` at most once.

    Raises ValueError for anything else (other syntax, other numbers, over 200 characters), SyntaxError and
    ZeroDivisionError.
    """
    if len(expression) > 200:
        raise ValueError("expression too long")
    left = Counter(allowed)

    def visit(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            left[node.value] -= 1
            if left[node.value] < 0:
                raise ValueError(f"{node.value} is not given, or used too often")
            return Fraction(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return _OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        raise ValueError(f"{ast.dump(node)[:40]} is not arithmetic on the given numbers")

    return visit(ast.parse(expression, mode="eval").body)
