"""What an environment is: tasks, a rollout, a reward. Single-turn, multi-turn and tool-using ones all fit.

    class Greeting(Environment):
        def tasks(self, split):
            return [Task("hello", (user("Say hello."),))]

        def reward(self, task, messages):
            return float("hello" in messages[-1]["content"].lower())

The default `rollout` asks once. A multi-turn environment overrides it and calls `chat.reply(...)` as often as it
likes; a tool is a message with role "tool" that the environment adds. An environment runs in a process of its own and
never sees tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

from prl.config.errors import UserError

Message = dict[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": str}
Tool = dict[str, Any]  # as OpenAI has it: {"type": "function", "function": {"name", "description", "parameters"}}
Split = Literal["train", "held_out"]
# How a rollout ended. policy: it finished, its length used up or not. environment: the environment raised or said
# nonsense. infrastructure: an engine, a connection or a process failed it. grader: the reward raised, hung or was no
# finite number. timeout: longer than env.rollout_timeout_s. Only `policy` trains (see env.on_timeout).
Outcome = Literal["policy", "environment", "infrastructure", "grader", "timeout"]
OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    return {"role": "assistant", "content": content}


@dataclass(frozen=True)
class Task:
    """One problem: what the model is shown first, and whatever the reward needs to know."""

    id: str
    prompt: tuple[Message, ...]
    info: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """What the policy said in one turn."""

    content: str
    finish_reason: str  # "stop" | "length" | "abort"
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Score:
    """How a rollout went. Metrics are numbers to watch, averaged per environment; nothing is trained on them."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


class ChatEnded(Exception):
    """No further reply is to be had: the context is full or the turn limit is reached. A rollout may let it pass."""


class GraderFailed(Exception):
    """What computes the reward has failed. For an environment that scores its rollouts itself to raise."""


class Chat(Protocol):
    """The conversation of one rollout."""

    messages: list[Message]  # everything said so far

    async def reply(self, *messages: Message) -> str:
        """Add messages, sample the assistant's next turn, add it, return its text. Raises ChatEnded."""

    async def complete(self, messages: list[Message], tools: list[Tool] | None = None) -> Reply:
        """The next turn of a conversation that is given whole, the chat template showing `tools`. Raises ChatEnded.

        Where it goes on from what was said here, the tokens sampled so far stay as they are; where it does not, because
        the environment rewrote or dropped messages, a new training sample begins.
        """


class Environment(ABC):
    """Subclasses take their arguments (`env.mix.<name>.args`) as keyword arguments of the constructor."""

    @abstractmethod
    def tasks(self, split: Split) -> Sequence[Task]:
        """All tasks of a split, in a fixed order. "held_out" tasks are never trained on."""

    async def rollout(self, task: Task, chat: Chat) -> Score | None:
        """Talk. The default shows the prompt and takes one reply.

        An environment that scores its rollouts itself returns the score; without one, `reward` is asked.
        """
        await chat.reply(*task.prompt)
        return None

    @abstractmethod
    def reward(self, task: Task, messages: list[Message]) -> float:
        """Score the whole conversation. Raising, hanging or returning NaN costs this rollout, not the run."""

    def demonstration(self, task: Task) -> list[Message]:
        """A conversation worth imitating, for supervised warm starts."""
        raise UserError(
            f"environment {type(self).__name__} has no demonstrations",
            where="warm_start.data.source or sft.data.source",
            fix="warm_start=none, or another data source",
        )
