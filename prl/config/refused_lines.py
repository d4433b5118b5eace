"""Overrides that Hydra reads and cannot apply, from its messages: which line, why, and the line to type instead."""

from __future__ import annotations

import re
from collections.abc import Set

from hydra.core.override_parser.types import ChoiceSweep, Override

from prl.config.errors import UserError
from prl.config.locate import config_groups, file_of_choice
from prl.config.overrides import choices_of, parse

ALREADY = "{key} is there already, and + is for what is not"
REASONS = {  # what Hydra says -> why; the first group is the key
    r"Could not append to config\. An item is already at '([^']+)'": ALREADY,
    r"Multiple values for ([\w/]+)\. ": ALREADY,
    r"force-add of config groups is not supported: '\+\+([\w/]+)": "++ is for keys, and {key} is a group",
    r"(?:In '[\w/]+': )?Could not override '[\w/]+@": "a group has one place in the configuration, and it is not that",
    r"Could not override '(hydra/[\w/]+)'": "Hydra has no such group",
    r"Could not delete from config\. The value of '([^']+)'": "what is deleted must have the value that is named",
}

NEEDS_MULTIRUN = re.compile(r"Ambiguous value for argument |Sweep parameters .* requires --multirun")


def needs_multirun(lines: list[str], command: str) -> UserError:
    """Of axes of a sweep in a command for one run.

    Args:
        command: the same one for a sweep.
    """
    axes = [override for override in parse(lines) if override.is_sweep_override()]
    typed = " ".join(str(override.input_line) for override in axes)
    others = [f"or {other}" for override in axes if (other := _as_one_value(override)) is not None]
    is_one = len(axes) == 1
    return UserError(
        f"{typed} {'is an axis' if is_one else 'are axes'} of a sweep, which needs -m.",
        where=typed,
        why="without -m a command is one run, and each key has one value",
        fix="; ".join([command, *others]),
    )


def _as_one_value(override: Override) -> str | None:
    """How the values of `key=a,b` are typed where the key takes all of them together; None where it takes one."""
    from prl.config.keys import field_of  # pydantic: a command that is right does without it

    key, value = override.key_or_group, override.value()
    if not (isinstance(value, ChoiceSweep) and value.simple_form):
        return None
    typed = override.get_value_string()
    if key == "env":
        return f"'{key}=[{typed}]' to mix them in one run"
    try:
        takes = str(field_of(key).annotation)
    except KeyError:
        return None
    if "tuple[" in takes:
        return f"'{key}=[{typed}]' for a list"
    return f"""'{key}="{typed}"' for a text with commas""" if re.search(r"\bstr\b", takes) else None


def refused_line(message: str, lines: list[str], job_groups: Set[str]) -> UserError | None:
    """Of one of these overrides, or of several that choose in one group; None for other messages."""
    for pattern, why in REASONS.items():
        met = re.match(pattern, message)
        key = met[1] if met and met.re.groups else None
        blamed = [o for o in parse(lines) if (o.key_or_group == key if key else o.package)] if met else []
        if blamed:
            group = blamed[0].key_or_group
            where = " ".join(str(override.input_line) for override in blamed)
            why = "a group is chosen once; several choices are a list" if len(blamed) > 1 else why.format(key=group)
            return UserError(f"{where} cannot be applied.", where=where, why=why, fix=_instead(blamed, job_groups))
    return None


def refused_file(message: str) -> UserError | None:
    """Of a file with a key for another launcher than the chosen one; None for other messages."""
    met = re.match(
        r"In '([\w/-]+)/([\w-]+)': \w+ raised while composing config:\s+Key '([^']+)' not in '(\w+)'\s+"
        r"full_key: hydra\.launcher\.([\w.]+)",
        message,
    )
    if met is None:
        return None
    path, key = file_of_choice(met[1], met[2]), met[5]
    launcher = "submitit_local" if "Local" in met[4] else "submitit_slurm"
    for_all = "write what is below it as keys of the node `slurm` at the top level, which holds for every launcher"
    return UserError(
        f"{path.name} says hydra.launcher.{key}, which this launcher has not.",
        where=str(path),
        why=f"hydra/launcher={launcher} has keys of its own",
        fix=for_all
        if key == "slurm"
        else f"leave it out of {path.name}, and say it where a launcher with that key is chosen",
    )


def _instead(blamed: list[Override], job_groups: Set[str]) -> str:
    key = blamed[0].key_or_group
    if blamed[0].is_delete():
        return f"~{key}"
    if key.startswith("hydra/"):
        return f"leave {key} out"
    if key not in config_groups():
        return f"{key}={blamed[0].get_value_element_as_str()}"
    choices = [choice for override in blamed for choice in choices_of(override)]
    chosen = choices[0] if len(choices) == 1 else f"[{','.join(choices)}]"
    return f"{'' if key in job_groups else '+'}{key}={chosen}"
