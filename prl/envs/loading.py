"""From an environment's id and arguments to the object."""

from __future__ import annotations

import difflib
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


def load_env(env_id: str, args: dict[str, Any]) -> Environment:
    """Build the environment `env_id`: the name of a built-in one, or "package.module:Class". Raises UserError."""
    target = BUILT_IN.get(env_id, env_id)
    if ":" not in target:
        near = difflib.get_close_matches(env_id, BUILT_IN, n=1)
        raise UserError(
            f"there is no environment {env_id!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
            where="env.mix.<name>.id",
            why=f"built in are {', '.join(BUILT_IN)}; others are given as package.module:Class",
            fix=f"env.mix.<name>.id={near[0] if near else 'my_package.my_env:MyEnv'}",
        )
    module_name, class_name = target.split(":", 1)
    try:
        cls = getattr(import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"environment {env_id!r} cannot be imported: {error}", where="env.mix.<name>.id") from error
    try:
        env = cls(**args)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"environment {env_id!r} refuses its arguments: {error}", where="env.mix.<name>.args"
        ) from error
    if not isinstance(env, Environment):
        raise UserError(f"{env_id!r} is not a prl.envs.protocol.Environment", where="env.mix.<name>.id")
    return env
