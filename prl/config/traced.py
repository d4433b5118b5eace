"""Which file of the user's own says a key whose value is refused, or leaves it to whoever uses the file: after
composition nobody else knows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator

import yaml
from omegaconf._utils import get_yaml_loader

from prl.config.errors import ConfigError, UserError
from prl.config.overrides import SWEEP_GROUP, keys_in, parse
from prl.config.own_files import chosen_files
from prl.config.unreadable import UNREADABLE

PARAMS = "hydra.sweeper.params."
SAID_BY = "said by "
LEFT = "???"  # OmegaConf's: to be given. As a value to merge it changes nothing, so that what stood before would hold


def traced(error: ConfigError, lines: Iterable[str], config_name: str) -> ConfigError:
    """The same, with file and line where the key that is wrong comes from a file and not from the command line."""
    lines = list(lines)
    said: dict[str, list[str]] = {}
    for key, place, _ in _said(lines, config_name):
        said.setdefault(key, []).append(place)
    if not said:
        return error
    typed = {override.key_or_group for override in parse(lines)}
    told = [_traced(violation, said, typed) for violation in error.violations]
    if told != error.violations:
        error = type(error)(told).with_traceback(error.__traceback__)
    return error


def left_to_user(lines: Iterable[str], config_name: str) -> list[UserError]:
    """One for each key that a chosen file wants to be given, and that nobody gives."""
    lines = list(lines)
    said = list(_said(lines, config_name))
    typed = parse(lines)
    given = {override.key_or_group for override in typed}
    # with all that would lie below; a choice of a group gives no key of it
    whole = {key for key, _, value in said if value not in (LEFT, None)}
    whole |= {override.key_or_group for override in typed if override.is_delete() or isinstance(override.value(), dict)}
    return [
        UserError(
            f"{key} has no value.",
            where=f"{key}={LEFT}, {SAID_BY}{place}",
            why="the file leaves it to whoever uses it",
            fix=f"{key}=VALUE on the command line",
        )
        for key, place, value in said
        if value == LEFT and key not in given and not any(f"{key}.".startswith(f"{other}.") for other in whole)
    ]


def _traced(violation: UserError, said: dict[str, list[str]], typed: set[str]) -> UserError:
    keys = [key for key in keys_in(violation.where) if key in said and key not in typed]
    if not keys or SAID_BY in violation.where:
        return violation
    if any(place.partition(", line")[0] in violation.where for key in keys for place in said[key]):
        return violation
    places = " and ".join(dict.fromkeys(place for key in keys for place in said[key]))
    where = f"{violation.where}, {SAID_BY}{places}"
    return UserError(violation.what, where=where, why=violation.why, fix=violation.fix)


def _said(lines: list[str], config_name: str) -> Iterator[tuple[str, str, str | None]]:
    """Every key that the chosen files say, in full, with the file and its line, and its value as it is written: "" of a
    list, None of one that has keys below it.
    """
    for file in chosen_files(lines, config_name):
        with contextlib.suppress(*UNREADABLE):
            text = file.path.read_text(encoding="utf-8")
            root = yaml.compose(text, Loader=get_yaml_loader())
            if isinstance(root, yaml.MappingNode):
                for key, line, value in _keys(root, file.place(text)):
                    key = key.removeprefix(PARAMS).lstrip("+") if file.group == SWEEP_GROUP else key
                    yield key, f"{file.path}, line {line}", value


def _keys(node: yaml.MappingNode, place: str) -> Iterator[tuple[str, int, str | None]]:
    for name, value in node.value:
        key = ".".join(filter(None, (place, re.sub(r"\s", " ", str(name.value)))))
        yield key, name.start_mark.line + 1, _as_written(value)
        if isinstance(value, yaml.MappingNode):
            yield from _keys(value, key)


def _as_written(node: yaml.Node) -> str | None:
    if isinstance(node, yaml.MappingNode):
        return None
    return str(node.value) if isinstance(node, yaml.ScalarNode) else ""
