"""Everything wrong with a command line, where its first refusal comes from one stage of several: lines that cannot be
read, keys and choices that there are not, values of a wrong type, keys of the launcher.

What is blamed is left out and the rest composed again, until nothing more is found. Rules across keys are left to the
command that is right in each of them: without what is wrong they would be about another configuration. Where keys of
the launcher alone are wrong, those of it that contradict a plan are told, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from hydra.errors import HydraException
from omegaconf import open_dict
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from launch.reading import settings_of
from launch.submitit_keys import refuse_asked
from prl.config.composing import compose, compose_yaml, refuse_contradictions
from prl.config.errors import ConfigError, UnfitMachineError, UserError
from prl.config.overrides import keys_in, parse
from prl.config.resolving import resolve
from prl.config.sweep import corners, launcher_of, sweep_lines
from prl.config.traced import traced

MOST_POINTS = 20  # that are looked at


def all_wrong(error: UserError, lines: list[str], config_name: str, multirun: bool) -> UserError:
    """The refusal with all that can be known beside it, each traced to the file that says it."""
    is_of_a_line = any(error.where == line for line in lines)
    if isinstance(error, UnfitMachineError) or not (isinstance(error, ConfigError) or is_of_a_line):
        return error
    found = list(error.violations) if isinstance(error, ConfigError) else [error]
    pending, left = found, lines
    while pending:
        left = [line for line in left if not any(_blames(told, line) for told in pending)]
        known = {told.what for told in found}
        pending = [
            told
            for told in _first_wrong(left, config_name, multirun)
            if told.what not in known and any(_blames(told, line) for line in left)
        ]
        pending = list({told.what: told for told in pending}.values())
        found = [*found, *pending]
    if all(told.where.startswith("hydra.launcher.") for told in found):
        found += [told for told in _contradictions(left, config_name, multirun) if any(_blames(told, x) for x in left)]
    whole = error if found == getattr(error, "violations", [error]) else ConfigError(found)
    readable = [line for line in lines if not any(told.where == line for told in found)]
    with contextlib.suppress(UserError, HydraException):
        return traced(whole, readable, config_name) if isinstance(whole, ConfigError) else whole
    return whole


def _blames(told: UserError, line: str) -> bool:
    if told.where == line:
        return True
    try:
        (override,) = parse([line])
    except UserError:
        return False
    return override.key_or_group in keys_in(told.where)


def _first_wrong(lines: list[str], config_name: str, multirun: bool) -> Iterator[UserError]:
    """Of the first stage that has any, and of the launcher."""
    try:
        refuse_contradictions(lines, config_name)
        points = corners(sweep_lines(lines, config_name))[:MOST_POINTS] if multirun else [lines]
        yield from _of_launcher(lines, config_name)
    except ConfigError as error:
        yield from error.violations
        return
    except (UserError, HydraException, OmegaConfBaseException):
        return
    for point in points:
        yield from _of_types(point, config_name)


def _of_launcher(lines: list[str], config_name: str) -> Iterator[UserError]:
    node = launcher_of(lines, config_name)
    try:
        settings_of(node)
    except ConfigError as error:
        yield from error.violations


def _contradictions(lines: list[str], config_name: str, multirun: bool) -> list[UserError]:
    """Between the launcher and the plans of the points, of lines that are right by themselves."""
    with contextlib.suppress(UserError, HydraException, OmegaConfBaseException):
        node = launcher_of(lines, config_name)
        points = corners(sweep_lines(lines, config_name))[:MOST_POINTS] if multirun else [lines]
        configs = [compose(point, config_name) for point in points]
        try:
            for config in configs:
                refuse_asked(node, config)
        except ConfigError as error:
            return error.violations
    return []


def _of_types(point: list[str], config_name: str) -> Iterator[UserError]:
    try:
        cfg = compose_yaml(point, config_name)
        with open_dict(cfg):
            del cfg["hydra"]
        resolve(cfg)
    except ConfigError as error:
        if isinstance(error.__cause__, (ValidationError, HydraException, OmegaConfBaseException)):
            yield from error.violations
    except (UserError, HydraException, OmegaConfBaseException):
        return
