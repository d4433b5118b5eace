"""Composition through Hydra's compose API, and Hydra's refusals in the user's terms."""

from __future__ import annotations

import functools
import os
import pickle
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra._internal.hydra import Hydra
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from prl.config.errors import ConfigError, UserError
from prl.config.hydra_setup import in_hydras_terms, register, unreadable_sweep
from prl.config.launcher_keys import NODE, unknown_launcher_keys
from prl.config.locate import SITE_GROUP, added_groups, conf_dir, config_groups, searched
from prl.config.overrides import (
    JOBS,
    SWEEP_GROUP,
    absent_groups,
    all_keys,
    choices_of,
    contradictions,
    diagnose,
    nearest,
    parse,
    unknown_choice,
)
from prl.config.own_files import overridden, wrong_files
from prl.config.refused_lines import NEEDS_MULTIRUN, needs_multirun, refused_file, refused_line
from prl.config.search_path import directories, state_of_files
from prl.config.traced import left_to_user, traced
from prl.config.unreadable import UNREADABLE, unreadable

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

VERSION_BASE = "1.3"
MOST_ANSWERS = 16  # of Hydra's that are kept
NOT_OURS = {"basic"}  # launchers that call Python functions


def compose_yaml(overrides: list[str], config_name: str = "rl") -> DictConfig:
    """The composed config with Hydra's node. Raises ConfigError for overrides that Hydra refuses."""
    refuse_contradictions(overrides, config_name)
    try:
        with _hydra():
            return _composed(config_name, in_hydras_terms(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, config_name) from error


def refuse_contradictions(overrides: list[str], config_name: str) -> None:
    """What Hydra would take, or end with a traceback of. Raises ConfigError, then with all that is wrong."""
    unreadable_file = unreadable_sweep(overrides)
    if unreadable_file is not None:
        raise unreadable_file
    refuse_unknown_job(config_name)
    of_files = wrong_files(overrides, config_name, _groups_of) + absent_groups(overrides)
    if of_files:
        raise ConfigError(of_files + contradictions(overrides))
    found = contradictions(overrides)
    if found:
        raise ConfigError(problems(overrides, config_name) or found)


def refuse_unknown_job(config_name: str) -> None:
    """Raise UserError for a --config-name that no directory has."""
    if not any((root / f"{config_name}.yaml").is_file() for root in (conf_dir(), *directories())):
        raise UserError(
            f"There is no job {config_name!r}.",
            where=f"--config-name={config_name}",
            why=f"jobs are {', '.join(JOBS)}; {config_name}.yaml was sought in {searched()}",
            fix=f"--config-name={nearest(config_name, JOBS) or 'rl'}",
        )


@functools.cache
def _groups_of(config_name: str) -> frozenset[str]:
    """In the defaults list of a job, those of Hydra among them."""
    with _hydra():
        chosen = _without_the_site(config_name).hydra.runtime.choices
    return frozenset(map(str, chosen)) - {SITE_GROUP}


def _without_the_site(config_name: str) -> DictConfig:
    """The job with Hydra's node, without what a site's own file says, which may be wrong. Inside of `_hydra()`."""
    try:
        return _composed(config_name, [f"~{SITE_GROUP}"])
    except HydraException:  # of a job of the user's own, which composes no such file
        return _composed(config_name)


_answers: dict[tuple[str, ...], bytes] = {}  # pickled: whoever asks may change what is given
_answers_to: list[object] = []  # the state of the files that they are of


def _composed(config_name: str, overrides: Sequence[str] = ()) -> DictConfig:
    """What Hydra composes, with its own node. Inside of `_hydra()`. A command that is refused wants the same several
    times, for its explanation, at 0.1 s each.
    """
    state = state_of_files(conf_dir())
    if _answers_to != [state]:
        _answers.clear()
        _answers_to[:] = [state]
    asked = (config_name, os.getcwd(), *overrides)  # which Hydra's node holds
    if asked in _answers:
        _answers[asked] = _answers.pop(asked)  # the last that is given up
        kept: DictConfig = pickle.loads(_answers[asked])
        return kept
    if len(_answers) >= MOST_ANSWERS:
        del _answers[next(iter(_answers))]
    answer = hydra_compose(config_name, overrides=list(overrides), return_hydra_config=True)
    with suppress(Exception):  # of a plugin's class that cannot be pickled, which may raise anything
        _answers[asked] = pickle.dumps(answer)
    return answer


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra on our conf/, also from within a running Hydra application. Raises ConfigError for a file that cannot be
    read.
    """
    register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base=VERSION_BASE):
            _add_directories()
            yield
    except UNREADABLE as error:
        if (told := unreadable(error)) is None:
            raise
        raise told from error
    finally:
        GlobalHydra.instance().hydra = outer


def _add_directories() -> None:
    """Those of the user's own, to the Hydra that was initialised just now."""
    if directories():
        search_path = GlobalHydra.instance().config_loader().get_search_path()
        for path in directories():
            search_path.prepend("command-line", f"file://{path}", anchor="schema")
        GlobalHydra.instance().clear()
        Hydra.create_main_hydra2(task_name="prl", config_search_path=search_path)


def compose(overrides: list[str], config_name: str = "rl") -> RunConfig:
    """The RunConfig of a command line. Raises ConfigError with all problems found."""
    from prl.config.resolving import resolve

    cfg = compose_yaml(overrides, config_name)
    if left := left_to_user(overrides, config_name):
        raise ConfigError(left)
    choices = run_choices(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    try:
        return resolve(cfg, choices=choices)
    except ConfigError as error:
        raise traced(error, overrides, config_name) from error


def run_choices(cfg: DictConfig) -> dict[str, str]:
    """Group -> choice as selected. A list (`env=[a,b]`) is no group choice to Hydra; it is taken from the overrides."""
    runtime = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items()}
    choices = {k: v for k, v in runtime.items() if "/" not in k and k not in ("memory", "local", SWEEP_GROUP)}
    for override in parse(task_overrides(cfg.hydra)):
        if isinstance(override.value(), list) and override.key_or_group in _LIST_GROUPS:
            choices[override.key_or_group] = "+".join(choices_of(override))
    return dict(sorted(choices.items()))


def task_overrides(hydra: DictConfig | HydraConf) -> list[str]:
    """The overrides as typed: Hydra's list of them would put in values for their `${...}`."""
    lines = OmegaConf.to_container(hydra.overrides.task, resolve=False)
    assert isinstance(lines, list)
    return [str(line) for line in lines]


_LIST_GROUPS = ("env",)
_HYDRAS_REMEDY = "To append to your config use "


def current_choices() -> dict[str, str]:
    """`run_choices` of the Hydra job that runs now."""
    return run_choices(OmegaConf.create({"hydra": HydraConfig.get()}))


def explain(error: Exception, overrides: list[str], config_name: str) -> ConfigError:
    """Every problem with the overrides; Hydra's own message where none of them is to blame."""
    try:
        found = problems(overrides, config_name)
    except ConfigError as of_a_file:
        return of_a_file
    except UserError as of_a_line:
        found = [of_a_line]
    if NEEDS_MULTIRUN.match(str(error)):
        found.append(needs_multirun(overrides, _with_multirun(overrides, config_name)))
    if not found and isinstance(error, OmegaConfBaseException) and error.full_key:
        from prl.config.resolving import unresolved

        found = [unresolved(error)]
    if not found and (refused := refused_line(str(error), overrides, _groups_of(config_name))) is not None:
        found = [refused]
    if not found and (other := _of_another_job(str(error), overrides, config_name)) is not None:
        found = [other]
    if not found and (of_a_site := refused_file(str(error))) is not None:
        found = [of_a_site]
    if not found and (of_a_sweeper := _of_a_sweepers_key(str(error), overrides, config_name)) is not None:
        found = [of_a_sweeper]
    if not found and (of_hydra := _of_hydras_group(str(error))) is not None:
        found = [of_hydra]
    if not found and (of_a_type := _of_a_type(error, overrides, config_name)) is not None:
        found = [of_a_type]
    if not found:
        cause = error.__cause__ or error
        text = str(error) or str(cause)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        remedy = next((line.partition(_HYDRAS_REMEDY)[2] for line in lines if line.startswith(_HYDRAS_REMEDY)), "")
        why = " ".join(line for line in lines[1:4] if not line.startswith(_HYDRAS_REMEDY))
        fix = shlex.quote(remedy) if remedy else f"leave it out; {all_keys(config_name)} shows what there is"
        if "={" in remedy:  # Hydra's own would add a key with that name
            group = remedy.lstrip("+").partition("=")[0]
            why, fix = "a group takes the name of a choice; keys in it are set one by one", f"{group}.NAME=VALUE"
        found = [UserError(lines[0] if lines else repr(cause), where=f"conf/{config_name}.yaml", why=why, fix=fix)]
    return ConfigError(found)


def _of_a_sweepers_key(message: str, overrides: list[str], config_name: str) -> UserError | None:
    """Of a key that the chosen sweeper's node has not."""
    met = re.match(r"Could not override 'hydra\.sweeper\.([\w.]+)'", message)
    if met is None:
        return None
    chosen = [line for line in overrides if line.startswith("hydra/sweeper=")]
    node = OmegaConf.to_container(compose_yaml(chosen, config_name).hydra.sweeper, resolve=False)
    known = sorted(_leaves(node, "hydra.sweeper"))
    guess = nearest(f"hydra.sweeper.{met[1]}", known)
    return UserError(
        f"The sweeper has no key {met[1]!r}." + (f" Did you mean {guess!r}?" if guess else ""),
        where=f"hydra.sweeper.{met[1]}" + f", {chosen[-1]}" * bool(chosen),
        why="its keys are those of its package",
        fix=f"{guess}=..." if guess else f"one of {', '.join(known)}",
    )


def _leaves(node: Any, name: str) -> Iterator[str]:
    if not isinstance(node, dict):
        yield name
        return
    for key, value in node.items():
        if not str(key).startswith("_"):
            yield from _leaves(value, f"{name}.{key}")


def _of_another_job(message: str, overrides: list[str], config_name: str) -> UserError | None:
    """Of an experiment or overlay that chooses in groups which this job has not."""
    met = re.match(r"In '([\w/-]+)': Could not override '([\w/]+)'", message)
    if met is None:
        return None
    group, _, file = met[1].rpartition("/")
    chosen = next((c for o in parse(overrides) if o.key_or_group == group for c in choices_of(o)), file)
    wanted = overridden(group, chosen) | {met[2]}
    lacking = sorted(wanted - _groups_of(config_name))
    fitting = [name for name in JOBS if wanted <= _groups_of(name) and name != config_name]
    return UserError(
        f"{group}/{chosen} is not for this job.",
        where=f"+{group}={chosen}, conf/{config_name}.yaml",
        why=f"it chooses in the group{'s' * (len(lacking) > 1)} {', '.join(lacking)}, which {config_name} has not",
        fix=_job_to_take(fitting) or f"leave {', '.join(f'`override /{name}`' for name in lacking)} out of it",
    )


_only_looks = [False]  # whether this command looks at the configuration of any job: prl.plan, prl.doctor
_options: list[str] = []  # of this command, beside its overrides


def know_command(only_looks: bool, options: Iterable[str]) -> None:
    """What remedies that are commands are made of.

    Args:
        only_looks: the remedy for what is of another job is `-cn JOB` in the same command, and not the command of that
            job, which starts something.
        options: of this command, beside its overrides.
    """
    _only_looks[0], _options[:] = only_looks, options


def _with_multirun(overrides: list[str], config_name: str) -> str:
    """The same command as a sweep."""
    if _only_looks[0]:
        return f"-m {shlex.join(overrides)}, in this command"
    return f"python -m prl.{config_name if config_name in JOBS else 'rl'} -m {shlex.join([*overrides, *_options])}"


def _job_to_take(names: list[str]) -> str:
    commands = [f"-cn {name}" if _only_looks[0] else f"python -m prl.{name}" for name in names]
    return " or ".join(commands) + (", in this command" if commands and _only_looks[0] else "")


def problems(overrides: list[str], config_name: str) -> list[UserError]:
    """What is wrong with the overrides, judged by the job's config without them: the schema is wider than one job.

    Keys that only a chosen group brings (`env=countdown env.mix.countdown.weight=2`) are looked for when they are met.
    """
    with _hydra():
        try:
            base = _composed(config_name)
        except HydraException:
            base = _without_the_site(config_name)
        groups = {str(group) for group in base.hydra.runtime.choices if "/" not in str(group)} - {SITE_GROUP}
        with open_dict(base):
            del base["hydra"]
        keys = set(_dotted(base))
        found = diagnose(overrides, keys, groups, config_name)
        if any(error.where not in groups and "=" not in error.where for error in found):
            for choice in sorted(_choices(overrides, groups)):
                keys |= _keys_with(choice, config_name)
            found = diagnose(overrides, keys, groups, config_name)
        if any(override.key_or_group.startswith(NODE) for override in parse(overrides)):
            found += unknown_launcher_keys(overrides, _without_keys_of_hydra(overrides, config_name).launcher)
    return found


def _keys_with(choice: str, config_name: str) -> set[str]:
    """Of a job with one choice more; none where a file is to blame, which is told by itself."""
    try:
        return set(_dotted(hydra_compose(config_name=config_name, overrides=[choice])))
    except HydraException:
        return set()


def _without_keys_of_hydra(overrides: list[str], config_name: str) -> DictConfig:
    """The node hydra of the choices that a command makes in Hydra's groups, less the keys that it sets. Inside of
    `_hydra()`.
    """
    choices = [line for line in overrides if line.startswith("hydra/")]
    try:
        return _composed(config_name, choices).hydra
    except HydraException:  # of a choice that there is not, or a site's file, which is told anyway
        return _without_the_site(config_name).hydra


def _of_hydras_group(message: str) -> UserError | None:
    """Of a choice that a group of Hydra has not."""
    met = re.match(
        r"In '[\w/-]+': Could not find '(hydra/\w+)/([^']*)'\s+Available options in '[\w/]+':(.*)", message, re.S
    )
    if met is None:
        return None
    choices = set(re.findall(r"^\s*([\w-]+)$", met[3], re.M)) - NOT_OURS
    ours_first = sorted(choices, key=lambda name: (not (conf_dir() / met[1] / f"{name}.yaml").is_file(), name))
    return unknown_choice(met[1], met[2], ours_first)


def _of_a_type(error: Exception, overrides: list[str], config_name: str) -> UserError | None:
    """Of a value that Hydra's own nodes, and launchers of plugins, have a type for."""
    met = re.match(r"Error merging override (\+*([\w./]+)=.*)", str(error))
    if met is None or error.__cause__ is None:
        return None
    from prl.config.keys import as_override

    with _hydra():
        usual = OmegaConf.select(OmegaConf.create({"hydra": _without_keys_of_hydra(overrides, config_name)}), met[2])
    why = str(error.__cause__).splitlines()[0]
    fix = "leave it out" if usual is None or OmegaConf.is_config(usual) else f"{met[2]}={as_override(usual)}"
    return UserError(f"{met[1]} is not valid.", where=met[2], why=why, fix=fix)


def _choices(overrides: list[str], groups: set[str]) -> Iterator[str]:
    """`group=choice` of every choice of these groups that exists; a list of choices as it is."""
    existing, added = config_groups(), added_groups()
    for override in parse(overrides):
        key, choices = override.key_or_group, choices_of(override)
        if key in added and override.is_add():
            yield from (f"+{key}={choice}" for choice in choices if choice in existing[key])
        elif key in groups and choices and all(choice in existing[key] for choice in choices):
            yield from [f"{key}=[{','.join(choices)}]"] if key in _LIST_GROUPS else (f"{key}={c}" for c in choices)


def _dotted(cfg: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in map(str, cfg):
        keys.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            keys += _dotted(node, f"{prefix}{key}.")
    return keys
