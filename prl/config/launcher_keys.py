"""Keys of hydra.launcher that the chosen launcher has not: what was meant, and how that is typed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from hydra.core.override_parser.types import Override
from hydra_plugins.hydra_submitit_launcher.config import LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf

from prl.config.errors import UserError
from prl.config.overrides import nearest, parse

NODE = "hydra.launcher."
TIME = "slurm.time"
OF_THIS_MACHINE = "timeout_min"
OTHER_WORDS = {  # as other launchers and sbatch call it -> here, the first that the launcher has
    **dict.fromkeys(("timeout", "timeout_min", "time", "time_min", "time_limit", "walltime"), (TIME, OF_THIS_MACHINE)),
    **dict.fromkeys(("name", "job_name"), ("slurm.job_name", "name")),
    "mem_gb": ("slurm.mem", "mem_gb"),
}
OPEN = "additional_parameters"  # takes any
LISTS = ("setup", "sbatch")
OF_THE_PLAN = ("nodes", "num_nodes", "gpus", "num_gpus", "gpus_per_node", "gpus_per_task", "ntasks", "tasks_per_node")
WHY_OF_THE_PLAN = "deployment and parallelism say what a point takes, and its job asks for that"


def unknown_launcher_keys(lines: Iterable[str], launcher: DictConfig) -> list[UserError]:
    """What is wrong with overrides below hydra.launcher, with or without a +.

    Args:
        launcher: the node hydra.launcher of this command without them.
    """
    known = _leaves(launcher)
    more = _keys_of_submitits(launcher) - known.keys()
    found = []
    for override in parse(lines):
        key = override.key_or_group.removeprefix(NODE)
        if key == override.key_or_group or override.is_delete():
            continue
        is_open = isinstance(known.get(OPEN), dict) and key.startswith(f"{OPEN}.")
        if key in more:
            if not (override.is_add() or override.is_force_add()):
                found.append(_left_out(key, override))
        elif key not in known and not is_open:
            found.append(_unknown(key, override, known))
    return found


def _keys_of_submitits(launcher: DictConfig) -> set[str]:
    """All that a file of one's own for a launcher of hydra-submitit-launcher may have."""
    for queue in (SlurmQueueConf, LocalQueueConf):
        if launcher.get("_target_") == queue()._target_:
            return {field.name for field in fields(queue)} | {"dry_run", "retry_failed"}
    return set()


def _left_out(key: str, override: Override) -> UserError:
    typed = (override.input_line or "").partition("=")[2]
    return UserError(
        f"The chosen file of hydra/launcher does not have the key {key!r}.",
        where=NODE + key,
        why="Hydra adds keys to a file by + only",
        fix=f"+{NODE}{key}={typed}",
    )


def _unknown(key: str, override: Override, known: dict[str, Any]) -> UserError:
    last = key.rsplit(".", 1)[-1]
    names = {name for name in known if name != "slurm" and not name.startswith("_")}
    guess = None if last in OF_THE_PLAN and last not in known else _meant(last, known) or nearest(key, names)
    if guess is None and last in OF_THE_PLAN:
        why, fix = WHY_OF_THE_PLAN, "leave it out"
    elif guess is None:
        why, fix = f"it has {', '.join(sorted(names))}", "leave it out"
    else:
        why = "every key must be one of the chosen launcher's, so that a typo cannot pass unseen"
        fix = f"{NODE}{guess}={_value(last, override, guess, known[guess])}"
    return UserError(
        f"This launcher has no key {key!r}." + (f" Did you mean {NODE + guess!r}?" if guess else ""),
        where=NODE + key,
        why=why,
        fix=fix,
    )


def _meant(word: str, known: dict[str, Any]) -> str | None:
    choices = OTHER_WORDS.get(word, ())
    if known.get("mode") == "local":
        choices = choices[::-1]
    return next((name for name in choices if name in known), None)


def _value(word: str, override: Override, guess: str, usual: Any) -> str:
    """What was typed where it can be meant, else what the launcher has."""
    typed = (override.input_line or "").partition("=")[2]
    if word == "mem_gb" and guess == "slurm.mem" and typed.isdecimal():
        return f"{typed}G"
    if guess == TIME:
        return typed if re.fullmatch(r"\d+|(\d+-)?\d+(:\d+){1,2}", typed) else str(usual)
    if guess.rsplit(".", 1)[-1] in LISTS and not typed.startswith("["):
        return f"[{typed}]"
    is_number = isinstance(usual, int | float) or guess == OF_THIS_MACHINE
    if is_number and not re.fullmatch(r"\d+", typed):
        return "60" if usual is None else str(usual).lower()
    return typed or "null"


def _leaves(launcher: DictConfig) -> dict[str, Any]:
    """Dotted keys and values; `slurm` with those below it."""
    plain = OmegaConf.to_container(launcher, resolve=False)
    assert isinstance(plain, dict)
    nested = plain.get("slurm")
    below = {f"slurm.{name}": value for name, value in nested.items()} if isinstance(nested, dict) else {}
    return {str(name): value for name, value in plain.items()} | below
