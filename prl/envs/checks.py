"""What an environment says, looked at before anything is done with it: on both sides of the websocket.

An environment is anybody's code. What it says and cannot be raises `Nonsense`, whose text names the field; that costs
one rollout.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from prl.config.errors import UserError
from prl.envs.protocol import Message, Task, Tool

ROLES = ("system", "user", "assistant", "tool")
LARGEST_REWARD = 1e12
LOOKED_AT = 1000  # tasks of a lazy sequence that are looked at when the environment starts


class Nonsense(ValueError):
    """Something that an environment says and that cannot be; the message names the field."""


def check_messages(messages: Any, name: str = "messages") -> list[Message]:
    """Messages of a chat, each with a known role and text that UTF-8 can hold. Raises Nonsense."""
    if not isinstance(messages, list | tuple):
        raise Nonsense(f"{name} is {_show(messages)}, not a list of messages")
    for index, message in enumerate(messages):
        _check_message(message, f"{name}[{index}]")
    return list(messages)


def _check_message(message: Any, name: str) -> None:
    if not isinstance(message, dict):
        raise Nonsense(f"{name} is {_show(message)}, not an object with role and content")
    for key in ("role", "content"):
        if key not in message:
            raise Nonsense(f"{name} has no {key}; it holds {', '.join(map(repr, message)) or 'nothing'}")
    role = message["role"]
    if not isinstance(role, str) or role not in ROLES:
        raise Nonsense(f"{name}.role is {_show(role)}, not one of {', '.join(ROLES)}")
    check_text(message["content"], f"{name}.content")
    if message.get("tool_calls"):
        _check_calls(message["tool_calls"], f"{name}.tool_calls")
    for key in message.keys() - {"role", "content"}:
        _check_json(message[key], f"{name}.{key}")
        check_text(key, f"a key of {name}")


def _check_calls(calls: Any, name: str) -> None:
    if not isinstance(calls, list | tuple):
        raise Nonsense(f"{name} is {_show(calls)}, not a list")
    for index, call in enumerate(calls):
        function = _function_of(call, f"{name}[{index}]")
        if not isinstance(function.get("arguments"), dict | str):
            what = _show(function.get("arguments"))
            raise Nonsense(f"{name}[{index}].function.arguments is {what}, neither an object nor JSON as text")


def check_tools(tools: Any) -> list[Tool]:
    """Tools as OpenAI has them. Raises Nonsense."""
    if not isinstance(tools, list | tuple):
        raise Nonsense(f"tools is {_show(tools)}, not a list")
    for index, tool in enumerate(tools):
        _function_of(tool, f"tools[{index}]")
        _check_json(tool, f"tools[{index}]")
    return list(tools)


def _function_of(value: Any, name: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict):
        raise Nonsense(f"{name} is {_show(value)}, not an object with a function")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise Nonsense(f"{name}.function.name is {_show(function.get('name'))}, not a name")
    return function


def check_text(value: Any, name: str) -> str:
    """Text that UTF-8 can hold: half of a surrogate pair is none. Raises Nonsense."""
    if not isinstance(value, str):
        raise Nonsense(f"{name} is {_show(value)}, not text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        found = f"U+{ord(value[error.start]):04X} at character {error.start}"
        raise Nonsense(f"{name} holds a lone surrogate, which UTF-8 cannot: {found}") from None
    return value


def _check_json(value: Any, name: str) -> None:
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Nonsense(f"{name} cannot be sent as JSON: {error}") from None


def check_number(value: Any, name: str) -> float:
    """A finite number, whatever library it comes from; text is none, though `float` would read it. Raises Nonsense."""
    if isinstance(value, str | bytes) or not hasattr(type(value), "__float__"):
        raise Nonsense(f"{name} is {_show(value)}, not a number")
    try:
        number = float(value)
    except Exception as error:  # an array, an integer of a thousand digits, a tensor on a lost device
        raise Nonsense(f"{name} is {_show(value)}, not one number: {error}") from None
    if not math.isfinite(number):
        raise Nonsense(f"{name} is {number}, not a finite number")
    return number


def check_reward(value: Any) -> float:
    """A number of which training can make a finite step. Raises Nonsense."""
    reward = check_number(value, "the reward")
    if abs(reward) > LARGEST_REWARD:
        raise Nonsense(f"the reward is {reward:g}; beyond {LARGEST_REWARD:g} a step in float32 is no longer finite")
    return reward


def check_metrics(metrics: Any) -> dict[str, float]:
    """Names and finite numbers. Raises Nonsense."""
    if not isinstance(metrics, dict):
        raise Nonsense(f"metrics is {_show(metrics)}, not a dict of names and numbers")
    return {
        check_text(key, "a name in metrics"): check_number(value, f"metrics[{key!r}]") for key, value in metrics.items()
    }


def check_task(task: Any) -> Task:
    """A task that can be begun. Raises Nonsense."""
    if not isinstance(task, Task):
        raise Nonsense(f"it is {_show(task)}, not a prl.envs.protocol.Task")
    check_text(task.id, "its id")
    check_messages(task.prompt, "its prompt")
    return task


def check_tasks(env: str, split: str, tasks: Any) -> Sequence[Task]:
    """What `tasks(split)` of environment `env` gives: all of a list, the first ones of a lazy sequence.

    Raises UserError naming the first task that is wrong.
    """
    where, fix = f"env.mix.{env}", "mend the environment's tasks(): a list of prl.envs.protocol.Task for either split"
    if isinstance(tasks, str) or not (hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__")):
        raise UserError(f"tasks({split!r}) of environment {env!r} gives {_show(tasks)}", where=where, fix=fix)
    if split == "train" and not len(tasks):
        raise UserError(f"environment {env!r} has no tasks to train on", where=where, fix=fix)
    limit = len(tasks) if isinstance(tasks, list | tuple) else min(len(tasks), LOOKED_AT)
    for index in range(limit):
        try:
            check_task(tasks[index])
        except Exception as error:  # a lazy sequence runs the environment's code
            what = f"task {index} of tasks({split!r}) of environment {env!r} is wrong"
            reason = str(error) if isinstance(error, Nonsense) else f"{type(error).__name__}: {error}"
            raise UserError(what, where=where, why=reason, fix=fix) from error
    return tasks


def _show(value: Any) -> str:
    """A value's type and its beginning, in characters that every encoding has."""
    if value is None:
        return "None"
    try:
        text = ascii(value)
    except Exception:
        text = "?"
    return f"a {type(value).__name__} ({text[:60]}{'...' if len(text) > 60 else ''})"
