"""Command-line overrides before composition: which were given, which are swept, and what is wrong with them."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.conf import HydraConf
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override
from hydra.errors import HydraException
from omegaconf import OmegaConf

from prl.config.errors import ConfigError, UserError
from prl.config.hydra_keys import GROUPS, refused_hydra_key
from prl.config.locate import added_groups, conf_dir, config_groups, folders_of, searched, sweep_files
from prl.config.search_path import directories

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader

SWEEP_GROUP = "sweep_file"
IN_POINT = " (first in the point "  # before the label of a sweep's point, where an error is of one
ENDING = "Hydra reads files that end in .yaml"
JOBS = ("rl", "sft", "inference", "bench", "eval")
# take keys that conf/ does not list; Hydra alone would ask for a +
OPEN_NODES = (
    "env.args.",
    "hydra.launcher.additional_parameters",
    *(f"inference.{group}{node}." for group in ("", "pd.prefill.", "pd.decode.") for node in ("vllm", "env")),
)


def parse(lines: Iterable[str]) -> list[Override]:
    """Parsed overrides. Raises UserError for a line that is no override, ConfigError for several."""
    parsed, found = [], []
    for line in lines:
        try:
            parsed.append(_parse_line(line))
        except UserError as error:
            found.append(error)
    if found:
        raise found[0] if len(found) == 1 else ConfigError(found)
    return parsed


class _Choices:
    """Answers `glob()` as Hydra's loader of configs does, by the names of files: of it, an axis needs no more."""

    def get_group_options(self, group_name: str, results_filter: ObjectType | None = None) -> list[str]:
        return _groups().get(group_name, [])


def _groups() -> dict[str, list[str]]:
    """Those of config_groups, and the ready-made sweeps under both of their names."""
    sweeps = sorted(sweep_files())
    return config_groups() | {SWEEP_GROUP: sweeps, "sweep": sweeps}


_CHOICES = cast("ConfigLoader", _Choices())


@functools.lru_cache(maxsize=4096)  # the points of a sweep say the same again and again
def _parse_line(line: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(line)
        override.config_loader = _CHOICES
        if not override.key_or_group:
            raise HydraException("it has no key")
        return override
    except HydraException as error:
        why = str(error).splitlines()[0]
        fix = "write key=value, key=[a,b] for a list, or -m key=a,b to sweep; quote what the shell would eat"
        fix += "; for ~ in a path write $HOME" if "~/" in line else ""
        if (quoted := _quoted(line)) is not None:
            why, fix = "it has a quotation mark that nothing closes, or that stands within a word", quoted
            if line.count('"') + line.count("'") == 0:
                signs = "letters beyond ASCII" if not line.isascii() else "; | & < > ^ ` ! and = within a list"
                why = f"{signs} stand in quotation marks, inside those that the shell takes"
        raise UserError(f"Cannot read the override {line!r}.", where=line, why=why, fix=fix) from error


_NEEDS_MARKS = re.compile("[\"';|&<>^`!=]|[^\\0-\\x7f]")


def _quoted(line: str) -> str | None:
    """A line whose value has signs or letters that Hydra knows in quotation marks only, as a shell and Hydra take it;
    None for others.
    """
    key, equals, value = line.partition("=")
    inner = value[1:] if value[:1] in ("'", '"') and value.count(value[0]) == 1 else value  # opened, never closed
    if not re.fullmatch(r"[+~]{0,2}[\w./@-]+", key) or not equals or not _NEEDS_MARKS.search(value):
        return None
    if inner.startswith("[") and inner.endswith("]"):
        line = f"{key}=[{','.join(_marked(part.strip()) for part in inner[1:-1].split(','))}]"
    else:
        line = f"{key}={_marked(inner)}"
    try:
        OverridesParser.create().parse_override(line)
    except HydraException:
        return None
    return shlex.quote(line)


def _marked(text: str) -> str:
    """In quotation marks of Hydra's grammar."""
    mark = "'" if '"' in text else '"'
    text = text.replace("\\", "\\\\").replace(mark, f"\\{mark}")
    return f"{mark}{text}{mark}"


def choices_of(override: Override) -> list[str]:
    """The group choices that an override names: of one value, of a list, of every point of a sweep. A dict is none: it
    sets keys in the group's node.
    """
    return ["null" if name is None else str(name) for name in _names(override)]


def _names(override: Override) -> list[object]:
    values = [value for value in _values(override) if not isinstance(value, dict)]
    names = [name for value in values for name in (value if isinstance(value, list) else [value])]
    return [name for name in names if name is not None or not override.is_delete()]  # ~group says none


def _values(override: Override) -> list[object]:
    """One, or those of a sweep; of an interval none."""
    if not override.is_sweep_override():
        return [override.value()]
    return list(override.sweep_iterator()) if override.is_discrete_sweep() else []


def swept_keys(lines: Iterable[str]) -> list[str]:
    """Keys that take several values in a multirun, in the order given."""
    return [override.get_key_element() for override in parse(lines) if override.is_sweep_override()]


def keys_in(where: str) -> list[str]:
    """The keys that the `where` of an error names: `a.b`, `a.b=3`, `+a=b, c`."""
    words = re.split(r"[,\s]+", where.partition(IN_POINT)[0])
    return [key for word in words if (key := word.partition("=")[0].lstrip("+~")) and not key.startswith("/")]


def name_of_axis(key: str) -> str:
    """What a swept key is called where people read it: without the + that appends (`+experiment`, `++x`)."""
    return key.lstrip("+")


def contradictions(lines: Iterable[str]) -> list[UserError]:
    """What is wrong with overrides by themselves, whatever they are composed with."""
    lines = list(lines)
    return _alias_conflict(lines) + _nameless_choices(lines) + _misused_nodes_of_hydra(lines) + empty_axes(lines)


def empty_axes(lines: Iterable[str]) -> list[UserError]:
    """Axes without a value (`memory=glob(x*)`, `seed=range(5,1)`): the sweep would have no point."""
    swept = [override for override in parse(lines) if override.is_discrete_sweep() and not _values(override)]
    return [_no_glob(override) if isinstance(override.value(), Glob) else _no_range(override) for override in swept]


def _no_range(override: Override) -> UserError:
    key = override.get_key_element()
    why, fix = "a range goes from its start to below its stop, in steps", f"'{key}=range(1,4)' is {key}=1,2,3"
    return UserError(f"{override.input_line} has no values.", where=str(override.input_line), why=why, fix=fix)


def _no_glob(override: Override) -> UserError:
    key, line = override.key_or_group, str(override.input_line)
    choices = _groups().get(key, [])
    if not choices:
        why, fix = (
            f"glob() takes the choices of a group, and {key} is none",
            f"{override.get_key_element()}=VALUE,VALUE",
        )
        return UserError(f"{line} has no values.", where=line, why=why, fix=fix)
    why, fix = f"{folders_of(key)} has: {', '.join(choices)}", f"'{override.get_key_element()}=glob(*)' for all of them"
    return UserError(f"{line} matches no choice.", where=line, why=why, fix=fix)


def _nameless_choices(lines: list[str]) -> list[UserError]:
    """Choices of groups that are no names (`env=5`, `parallelism=8`, `optim=null`): Hydra ends with a traceback."""
    groups = config_groups() | {SWEEP_GROUP: sorted(sweep_files())}
    return [
        unknown_choice(override.key_or_group, choice, groups[override.key_or_group])
        for override in parse(lines)
        if override.key_or_group in groups
        if not all(isinstance(name, str) for name in _names(override))
        for choice in choices_of(override)
        if choice not in groups[override.key_or_group]
    ]


def _misused_nodes_of_hydra(lines: list[str]) -> list[UserError]:
    """`hydra/launcher=5`, `hydra=5`, `hydra.launcher=5`: tracebacks of Hydra's, too; Hydra's own keys swept; and those
    that do nothing here.
    """
    errors = []
    for override in parse(lines):
        key, names = override.key_or_group, _names(override)
        has_dicts = any(isinstance(value, dict) for value in _values(override))
        if key.startswith("hydra/") and (has_dicts or not all(isinstance(name, str) for name in names)):
            why, fix = "a group of Hydra: its choices have names", "hydra/launcher=local, hydra/launcher=slurm"
        elif (told := _refused_of_hydra(override)) is not None:
            why, fix = told
        elif key in _nodes_of_hydra() and names:
            why, fix = "it holds keys of Hydra's own, and is no key itself", "hydra.sweep.dir=..., hydra/launcher=local"
        elif key == "hydra.verbose" and (has_dicts or not all(isinstance(name, (bool, str)) for name in names)):
            why, fix = "it names loggers, or is true or false", "hydra.verbose=true"
        elif override.is_sweep_override() and key.startswith(("hydra.", "hydra/")):
            why, fix = "Hydra's own keys say how a sweep runs, and are the same for all of its points", f"{key}=..."
        else:
            continue
        errors.append(UserError(f"{override.input_line} is not valid.", where=key, why=why, fix=fix))
    return errors


def _refused_of_hydra(override: Override) -> tuple[str, str] | None:
    """Why a key or a choice of Hydra's is refused, and what to say instead."""
    key = override.key_or_group
    if key.removeprefix("hydra/") in GROUPS and choices_of(override) == ["none"]:
        return None  # as it is
    if (told := refused_hydra_key(key)) is not None and key.startswith(("hydra.", "hydra/")):
        return told
    first = key.removeprefix("hydra.").partition(".")[0]
    if key.startswith("hydra.") and first not in HydraConf.__dataclass_fields__:
        close = nearest(first, HydraConf.__dataclass_fields__)
        rest = key.removeprefix("hydra.").removeprefix(first)
        return "Hydra has no such key", f"hydra.{close}{rest}=..." if close else "leave it out"
    return None


@functools.cache
def _nodes_of_hydra() -> frozenset[str]:
    config = OmegaConf.structured(HydraConf)
    nodes = {key for key in config if OmegaConf.is_dict(config._get_node(key))}
    return frozenset({"hydra", "hydra.launcher", "hydra.sweeper", *(f"hydra.{key}" for key in nodes)})


def _alias_conflict(lines: Iterable[str]) -> list[UserError]:
    """`memory` and `memory_recipe` name the same thing: both at once is a mistake."""
    values = {o.key_or_group: ",".join(choices_of(o)) for o in parse(lines) if o.key_or_group in _ALIASES}
    if set(values) != _ALIASES:
        return []
    return [
        UserError(
            f"memory={values['memory']} and memory_recipe={values['memory_recipe']} are both given.",
            where="memory, memory_recipe",
            why="memory= is a short name of memory_recipe=",
            fix=f"memory={values['memory']}, or memory_recipe={values['memory_recipe']}",
        )
    ]


_ALIASES = {"memory", "memory_recipe"}


_OTHER_WORDS = {"learning_rate": "lr"}  # as others call it -> here


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known key that `word` most probably meant: the same last part elsewhere, or a similar spelling."""
    known = sorted(known)
    parent, dot, last = word.rpartition(".")
    last = _OTHER_WORDS.get(last, last)
    word = f"{parent}{dot}{last}"
    same_last = [key for key in known if key.rsplit(".", 1)[-1] == last]
    if same_last:
        return min(same_last, key=lambda key: (-difflib.SequenceMatcher(None, word, key).ratio(), len(key)))
    close = [
        key  # not for its parents alone, which are most of a long key
        for key in difflib.get_close_matches(word, known, n=5, cutoff=0.6)
        if difflib.SequenceMatcher(None, last, key.rsplit(".", 1)[-1]).ratio() >= 0.6
    ]
    if close:
        return close[0]
    by_last = {key.rsplit(".", 1)[-1]: key for key in known}
    cutoff = 0.9 if parent else 0.8  # short names are alike by chance
    close = difflib.get_close_matches(last, list(by_last), n=1, cutoff=cutoff)
    return by_last[close[0]] if close else None


def all_keys(job: str) -> str:
    """The command that shows every key of a job."""
    return f"python -m prl.{job if job in JOBS else 'rl'} --cfg job"


def _in_open_node(key: str) -> str | None:
    """What was meant by a key below a misspelt node that takes any (`env.arg.gym`)."""
    parent, _, last = key.rpartition(".")
    close = difflib.get_close_matches(parent, [node.rstrip(".") for node in OPEN_NODES], n=1, cutoff=0.8)
    return f"{close[0]}.{last}" if close else None


OF_A_LAUNCHER = ("dry_run", "retry_failed", "parallel_points")


def unknown_key(key: str, known: Iterable[str], job: str = "rl") -> UserError:
    if key in OF_A_LAUNCHER:
        return UserError(
            f"There is no key {key!r}. Did you mean 'hydra.launcher.{key}'?",
            where=key,
            why="it is for submitting, and stands with what submits",
            fix=f"hydra.launcher.{key}=...",
        )
    guess = _in_open_node(key) or nearest(key, known)
    return UserError(
        f"There is no key {key!r}." + (f" Did you mean {guess!r}?" if guess else ""),
        where=key,
        why="every key must exist in the schema, so that a typo cannot pass unseen",
        fix=f"{guess}=..." if guess else f"see all keys: {all_keys(job)}",
    )


def absent_groups(lines: Iterable[str]) -> list[UserError]:
    """Choices of groups that no directory has (`+overlay=mine`): to Hydra they are keys with a text as their value."""
    groups = {*config_groups(), SWEEP_GROUP, "sweep"}
    return [
        _absent_group(override, groups)
        for override in parse(lines)
        if (override.is_add() or override.is_force_add()) and override.package is None
        if not (key := override.key_or_group).startswith("hydra/") and "." not in key and key not in groups
        if (names := _names(override)) and all(isinstance(name, str) for name in names)
        if "/" in key or key not in _top_level()
    ]


def _top_level() -> set[str]:
    from prl.config.schema import RunConfig  # pydantic: --cfg and completion do without it

    return {"hydra", *RunConfig.model_fields}


def _absent_group(override: Override, groups: set[str]) -> UserError:
    key, choice = override.key_or_group, ",".join(choices_of(override))
    if passed := [found for name in choices_of(override) if (found := passed_over(key, name)) is not None]:
        return passed[0].error(f"+{key}={choice}")
    guess = nearest(key, groups | _top_level())
    prefix = "+" if guess in added_groups() else ""
    return UserError(
        f"There is no key {key!r}, and no group of that name." + (f" Did you mean {guess!r}?" if guess else ""),
        where=f"+{key}={choice}",
        why=f"a group is a directory of YAML files, and {key}/ was sought in {searched()}",
        fix=f"{prefix}{guess}={choice}" if guess else f"--config-dir DIRECTORY, with {choice}.yaml in DIRECTORY/{key}/",
    )


def _of_added_group(override: Override, choices: list[str]) -> list[UserError]:
    """What is wrong with the choice of a group that is in no defaults list."""
    group, asked = override.key_or_group, choices_of(override)
    unknown = [unknown_choice(group, choice, choices, prefix="+") for choice in asked if choice not in choices]
    if unknown or override.is_add() or override.is_force_add():
        return unknown
    return [
        UserError(
            f"The group {group} is not in the defaults of this job.",
            where=f"{group}={','.join(asked)}",
            why="Hydra adds a group that no defaults list names only when told so",
            fix=f"+{group}={','.join(asked)}",
        )
    ]


def unknown_choice(group: str, choice: str, choices: list[str], prefix: str = "") -> UserError:
    if (passed := passed_over(group, choice)) is not None:
        return passed.error(f"{prefix}{group}={choice}")
    close = difflib.get_close_matches(choice, choices, n=1, cutoff=0.5)
    return UserError(
        f"There is no choice {choice!r} in group {group!r}." + (f" Did you mean {close[0]!r}?" if close else ""),
        where=f"{prefix}{group}={choice}",
        why=f"{folders_of(group)} has: {', '.join(choices)}",
        fix=f"{prefix}{group}={close[0] if close else choices[0]}",
    )


@dataclass(frozen=True)
class PassedOver:
    """A file that was meant as a choice and is not read."""

    path: Path
    why: str
    fix: str

    def error(self, where: str) -> UserError:
        return UserError(f"{self.path.name} is not read.", where=where, why=self.why, fix=self.fix)


def passed_over(group: str, choice: str) -> PassedOver | None:
    """For its ending, which Hydra does not read, or since it is a link to what is not there."""
    name = "memory_recipe" if group == "memory" else group
    for folder in (root / name for root in (conf_dir(), *directories())):
        link = folder / f"{choice}.yaml"
        if os.path.islink(link) and not os.path.exists(link):
            fix = f"ln -sfn THE_FILE {shlex.quote(str(link))}"
            return PassedOver(link, f"{link} is a link to {os.readlink(link)}, and leads to no file", fix)
        for path in sorted(folder.glob("*")) if os.path.isdir(folder) else ():  # nothing, if it may not be read
            if path.stem == choice and path.suffix != ".yaml" and path.suffix.lower() in (".yml", ".yaml"):
                command = ["mv", str(path), str(path.with_suffix(".yaml"))]
                return PassedOver(path, ENDING, shlex.join(command))
    return None


def diagnose(lines: Iterable[str], known_keys: set[str], used_groups: set[str], job: str = "rl") -> list[UserError]:
    """Everything wrong with overrides that Hydra refused, all at once.

    Args:
        lines: the overrides as typed.
        known_keys: dotted keys of the composed config of this job.
        used_groups: the groups in the defaults list of this job.
        job: its name.
    """
    lines = list(lines)
    groups, added = config_groups(), added_groups()
    found: list[UserError] = []
    for override in parse(lines):
        key = override.key_or_group
        if key.split(".")[0] == "hydra" or key.startswith(("hydra/", *OPEN_NODES)):
            continue
        has_dicts = any(isinstance(value, dict) for value in _values(override))
        if key in added and key not in used_groups:
            found += _of_added_group(override, groups[key])
            continue
        if key in used_groups:
            found += [unknown_choice(key, c, groups[key]) for c in choices_of(override) if c not in groups[key]]
        if key not in known_keys and (has_dicts or key not in used_groups):
            found.append(unknown_key(key, known_keys if key in used_groups else known_keys | used_groups, job))
    return found + _alias_conflict(lines)
