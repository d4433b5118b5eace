"""An environment that goes wrong in every way that must cost a rollout only: once for each of its tasks, or always."""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading

from prl.envs.protocol import Environment, Score, Task, user

# what the environment does wrong -> how the rollout is counted, and what is said of it
MESSAGES = {
    "lone surrogate": ({"role": "user", "content": "half \ud800"}, "messages[0].content holds a lone surrogate"),
    "content None": ({"role": "user", "content": None}, "messages[0].content is None, not text"),
    "no role": ({"content": "hello"}, "messages[0] has no role"),
    "strange role": ({"role": "robot", "content": "hello"}, "messages[0].role is a str ('robot'), not one of"),
    "text for a message": ("hello", "messages[0] is a str ('hello'), not an object"),
    "parts": ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content is a list"),
    "tool call": (
        {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]},
        "messages[0].tool_calls[0] is a dict",
    ),
    "surrogate elsewhere": ({"role": "user", "content": "x", "name": "\udfff"}, "messages[0].name cannot be sent"),
}
METRICS = {
    "metric abc": ({"m": "abc"}, "metrics['m'] is a str ('abc'), not a number"),
    "metric None": ({"m": None}, "metrics['m'] is None, not a number"),
    "metric nan": ({"m": math.nan}, "metrics['m'] is nan, not a finite number"),
    "metrics list": ([1.0], "metrics is a list"),
}
REWARDS = {
    "reward text": ("0.5", "the reward is a str ('0.5'), not a number"),
    "reward None": (None, "the reward is None, not a number"),
    "reward inf": (math.inf, "the reward is inf, not a finite number"),
}
EXPECTED = {
    **{kind: ("environment", says) for kind, (_, says) in (MESSAGES | METRICS).items()},
    "returns text": ("environment", "rollout() returned a str, neither a Score nor None"),
    "raises": ("environment", "LookupError: no such thing \\ud800"),
    "leaves": ("environment", "SystemExit: 3"),
    "cancels itself": ("environment", "CancelledError"),
    **{kind: ("grader", says) for kind, (_, says) in REWARDS.items()},
    "score abc": ("grader", "the reward is a str ('abc'), not a number"),
    "reward raises": ("grader", "ZeroDivisionError: no words"),
    "reward hangs": ("grader", "no reward after"),
    "never ends": ("timeout", "no end after"),
}


class OddEnv(Environment):
    """Four good tasks and one for each kind; that one goes wrong in its first rollout (`always`: in every one).

    `forks`: the good ones copy the process in their first rollout, and the copy goes on as if it were the original.
    """

    def __init__(self, kinds=(), always=False, forks=False):
        self.kinds, self.always, self.forks = list(kinds) or list(EXPECTED), always, forks
        self.begun = set()

    def tasks(self, split):
        names = [f"good {i}" for i in range(0 if self.always else 4)] + self.kinds
        return [Task(f"{split}/{name}", (user(f"say {name}"),), {"kind": name}) for name in names]

    async def rollout(self, task, chat):
        kind = task.info["kind"]
        if self.forks and kind.startswith("good") and task.id not in self.begun:
            os.fork()
        if task.id in self.begun and not self.always:
            kind = "good"
        self.begun.add(task.id)
        if kind in MESSAGES:
            await chat.reply(MESSAGES[kind][0])
        await chat.reply(*task.prompt)
        if kind == "returns text":
            return "well"
        if kind == "raises":
            raise LookupError("no such thing \ud800")
        if kind == "leaves":
            sys.exit(3)
        if kind == "cancels itself":
            raise asyncio.CancelledError
        if kind == "never ends":
            await asyncio.sleep(3600)
        if kind in METRICS:
            return Score(0.5, METRICS[kind][0])
        if kind == "score abc":
            return Score("abc")
        if kind.startswith("reward"):
            return None
        text = chat.messages[-1]["content"]
        return Score(sum(c.islower() for c in text) / max(len(text), 1), {"length": len(text)})

    def reward(self, task, messages):
        kind = task.info["kind"]
        if kind == "reward raises":
            raise ZeroDivisionError("no words")
        if kind == "reward hangs":
            threading.Event().wait(3600)
        return REWARDS[kind][0]
