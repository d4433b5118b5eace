"""From an environment's id and arguments to the object."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

from prl.config.errors import UserError
from prl.envs.protocol import Environment

BUILT_IN = {
    "reverse_text": "prl.envs.reverse_text:ReverseText",
    "alphabet_sort": "prl.envs.alphabet_sort:AlphabetSort",
    "countdown": "prl.envs.countdown:Countdown",
    "hf_math": "prl.envs.hf_math:HuggingFaceMath",
    "verifiers": "prl.envs.verifiers_env:VerifiersEnvironment",
}


ENV_KEY = "env.mix.<name>"  # of all that is told about an environment, until `told_with_keys` knows better
ID_KEY, ARGS_KEY = f"{ENV_KEY}.id", f"{ENV_KEY}.args"


@contextlib.contextmanager
def told_with_keys(id_key: str, args_key: str) -> Iterator[None]:
    """An environment is loaded and asked for its tasks: a UserError names these keys, where it came from."""
    try:
        yield
    except UserError as error:
        where, fix = (
            text.replace(ID_KEY, id_key).replace(ARGS_KEY, args_key).replace(ENV_KEY, id_key.rpartition(".")[0])
            for text in (error.where, error.fix)
        )
        raise UserError(error.what, where=where, why=error.why, fix=fix) from error


def load_env(env_id: str, args: dict[str, Any]) -> Environment:
    """Build the environment `env_id`: the name of a built-in one, or "package.module:Class". Raises UserError."""
    target = BUILT_IN.get(env_id, env_id)
    if not re.fullmatch(r"[\w.]*\w:\w+", target) or target.startswith("."):
        near = difflib.get_close_matches(env_id, BUILT_IN, n=1)
        raise UserError(
            f"there is no environment {env_id!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            where=ID_KEY,
            why=f"built in are {', '.join(BUILT_IN)}; others are given as package.module:Class",
            fix=f"{ID_KEY}={near[0] if near else 'my_package.my_env:MyEnv'}",
        )
    module_name, class_name = target.split(":", 1)
    try:
        cls = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"environment {env_id!r} cannot be imported: {error}",
            where=ID_KEY,
            why="modules are looked for in the current directory, on PYTHONPATH and among what is installed",
            fix=f"python -c 'import {module_name}' here must work, and it must have {class_name}",
        ) from error
    if not (isinstance(cls, type) and issubclass(cls, Environment)):  # before anybody calls it
        raise UserError(
            f"{env_id!r} is not a prl.envs.protocol.Environment",
            where=ID_KEY,
            why=f"it is {cls!r:.80}, not a class made from it",
            fix=f"class {class_name}(prl.envs.protocol.Environment): ...",
        )
    try:
        return cls(**args)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"environment {env_id!r} refuses its arguments: {error}",
            where=ARGS_KEY,
            why=f"{class_name}(**args) was called with {args!r:.200}",
            fix=f"{ARGS_KEY} as {class_name}.__init__ takes them: {class_name}{_signature(cls)}",
        ) from error


def _signature(cls: type) -> str:
    try:
        return str(inspect.signature(cls))
    except (TypeError, ValueError):  # of a class that is no Python
        return "(...)"
