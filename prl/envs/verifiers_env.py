"""Environments of the package `verifiers` (https://github.com/PrimeIntellect-ai/verifiers): `env=verifiers env.id=...`.

They run in our `env/<name>` process like any other. What the environment asks its client, the orchestrator answers
(`verifiers_client.py`), so the tokens trained on are the ones sampled. Prompts, turns and rubrics are the package's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.config.packages import VERIFIERS
from prl.envs.protocol import Chat, Environment, GraderFailed, Message, Score, Split, Task

ID_FORMS = "an installed environment's name, package.module:function, or the path of a module or folder"

# what the reward functions of the rollout that runs in this context have raised
_raised: ContextVar[list[str]] = ContextVar("_raised")


class RolloutError(RuntimeError):
    """What went wrong inside the environment, in its own words."""


class VerifiersEnvironment(Environment):
    """One environment of `verifiers`, whatever its number of turns.

    Args:
        id: see `load`.
        args: of its `load_environment`.
        held_out_fraction: share of the training data to hold out, from its end, if there is no data for evaluation.

    Raises UserError when it cannot be loaded, or needs what a rollout here does not have.
    """

    def __init__(self, id: str, args: dict[str, Any] | None = None, held_out_fraction: float = 0.05) -> None:
        if not 0 < held_out_fraction < 1:
            raise ValueError(f"held_out_fraction must lie between 0 and 1, got {held_out_fraction}")
        with _signals_kept():
            self.env = load(id, args or {})
            _refuse_foreign(id, self.env)
            self.rows = _split(id, self.env, held_out_fraction)
        for rubric in _rubrics(self.env):
            rubric.funcs[:] = [_recording(func) for func in rubric.funcs]

    def tasks(self, split: Split) -> Sequence[Task]:
        return _Rows(split, self.rows[split])

    async def rollout(self, task: Task, chat: Chat) -> Score:
        from prl.envs.verifiers_client import MODEL, ChatClient

        raised: list[str] = []
        _raised.set(raised)
        output = await self.env.run_rollout(task.info["input"], ChatClient(chat), MODEL, sampling_args={})
        if output["error"] is not None:
            raise RolloutError(output["error"]["error_chain_repr"])
        if raised:
            raise GraderFailed("; ".join(raised))
        metrics = {name: float(value) for name, value in (output["metrics"] or {}).items()}
        return Score(output["reward"], {name: value for name, value in metrics.items() if math.isfinite(value)})

    def reward(self, task: Task, messages: list[Message]) -> float:
        raise AssertionError("its rollouts come with their score")


def load(id: str, args: dict[str, Any]) -> Any:
    """The `verifiers.Environment` of an id.

    Args:
        id: the name of an installed environment, as verifiers' own `load_environment` takes it;
            "package.module:function" (or class); or the path of a module, package or environment folder.
        args: keyword arguments of its `load_environment`, or of the function.
    """
    if find_spec("verifiers") is None:
        raise UserError("env=verifiers needs the package verifiers", where=f"env.id={id}", fix=VERIFIERS.install)
    import verifiers as vf

    try:
        env = _call(id, args) if ":" in id else vf.load_environment(_importable(id), **args)
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        raise UserError(
            f"the verifiers environment {id!r} cannot be loaded",
            where="env.id, env.args",
            why=f"{error}{cause}",
            fix=f"env.id is {ID_FORMS}",
        ) from error
    if not isinstance(env, vf.Environment):
        raise UserError(
            f"{id!r} gives a {type(env).__name__}, which is no verifiers.Environment",
            where="env.id",
            why="environments made for verifiers.v1 (tasksets and harnesses) are not supported",
            fix=f"env.id is {ID_FORMS}",
        )
    return env


def _call(id: str, args: dict[str, Any]) -> Any:
    module, _, name = id.partition(":")
    return getattr(import_module(module), name)(**args)


def _importable(id: str) -> str:
    """The id, or the name of the module that a path leads to, which can be imported from now on."""
    path = Path(id).expanduser()
    if not (path.exists() and ("/" in id or path.suffix == ".py")):
        return id
    path = path.resolve()
    name = path.stem.replace("-", "_")
    # a folder is a package itself, or a project: a pyproject.toml beside the module of its name
    inside = path.is_dir() and not (path / "__init__.py").exists()
    sys.path.insert(0, str(path if inside else path.parent))
    return name


def _refuse_foreign(id: str, env: Any) -> None:
    """Raise UserError for what a rollout here cannot give."""
    for wants, what, why in (
        (env.requires_group_rollouts, "rewards of whole groups", "rollouts are scored one by one"),
        (env.message_type != "chat", f"message_type={env.message_type}", "completions are those of a chat"),
    ):
        if wants:
            raise UserError(f"the verifiers environment {id!r} needs {what}", where="env.id", why=why)


def _split(id: str, env: Any, held_out_fraction: float) -> dict[str, Any]:
    """Rows to train on and held-out ones. `get_eval_dataset` alone would fall back to those of training."""
    if env.dataset_source is None:
        raise UserError(
            f"the verifiers environment {id!r} has no data to train on", where="env.id", why="it is for evaluation only"
        )
    train = env.get_dataset()
    if env.eval_dataset_source is not None:
        return {"train": train, "held_out": env.get_eval_dataset()}
    cut = len(train) - max(1, round(len(train) * held_out_fraction))
    return {"train": train.select(range(cut)), "held_out": train.select(range(cut, len(train)))}


class _Rows(Sequence[Task]):
    """Rows of a dataset as tasks, read when asked for."""

    def __init__(self, split: Split, rows: Any) -> None:
        self.split, self.rows = split, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        return Task(f"{self.split}/{index}", (), {"input": dict(self.rows[index])})


def _rubrics(env: Any) -> Iterator[Any]:
    """Every rubric that scores for `env`, those inside groups included."""
    import verifiers as vf

    waiting = [env.rubric, *([inner.rubric for inner in env.envs] if isinstance(env, vf.EnvGroup) else [])]
    while waiting:
        rubric = waiting.pop()
        yield rubric
        waiting += rubric.rubrics if isinstance(rubric, vf.RubricGroup) else []


def _recording(func: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function that notes what it raises: the rubric alone would log it and count it as a reward of zero."""

    @functools.wraps(func)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            result = func(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result
        except Exception as error:
            _raised.get().append(f"{func.__name__} raised {type(error).__name__}: {error}")
            raise

    return call


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """verifiers' environments install handlers of SIGINT and SIGTERM; how this process stops is ours to say."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
