"""Many points of one job, composed fast: Hydra reads the YAML once for each set of group choices, and plain values are
set on a copy of what it made.

Of a thousand points most differ in values alone. What is not plainly `key=value` on a key that is there (groups,
`+key`, `~key`, dicts, Hydra's own keys) goes to Hydra, and so does every point that fails, for its explanation. Values
count in the order given: one that stands before what goes to Hydra and touches it goes there, too. Where nothing refers
to another key (`${key}`), the copy is of plain dicts, which costs a fifth of OmegaConf's.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from prl.config.composing import compose, compose_yaml, run_choices
from prl.config.errors import ConfigError
from prl.config.locate import conf_dir, config_groups
from prl.config.overrides import OPEN_NODES, parse
from prl.config.search_path import directories, state_of_files, yaml_files
from prl.config.traced import LEFT
from prl.config.unreadable import UNREADABLE

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


@dataclass(frozen=True)
class Base:
    """What Hydra made of some overrides, without its own node. Pickled: a copy costs a quarter of `deepcopy`."""

    pickled: bytes  # a DictConfig
    plain: bytes | None  # the same as dicts; None where one key refers to another
    choices: dict[str, str]


class Composer:
    """Composes points of `config_name`. One object for a whole sweep."""

    def __init__(self, config_name: str) -> None:
        self.config_name = config_name
        self.groups = frozenset(config_groups())
        self.bases: dict[tuple[str, ...], Base] = {}
        self.has_left = any(_leaves_keys(path) for root in directories() for path in yaml_files(root))

    def compose(self, overrides: list[str]) -> RunConfig:
        """As `prl.config.composing.compose`. Raises ConfigError with all problems found."""
        from prl.config.resolving import resolve, resolve_plain

        if self.has_left:  # by a file of the user's own, and only the whole line tells whether it is given
            return compose(overrides, self.config_name)
        try:
            values, rest = self._split(parse(overrides))
            base = self._base(rest)
            plain = _set_plainly(base.plain, values)
            if plain is None:
                cfg: DictConfig = pickle.loads(base.pickled)
                for override in values:
                    OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        except (ConfigError, OmegaConfBaseException):
            return compose(overrides, self.config_name)  # which explains it
        if plain is not None:
            return resolve_plain(plain, choices=base.choices)
        return resolve(cfg, choices=base.choices)

    def _base(self, overrides: tuple[str, ...]) -> Base:
        if overrides not in self.bases:
            cfg = compose_yaml(list(overrides), self.config_name)
            choices = run_choices(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            plain = OmegaConf.to_container(cfg)
            needs_omegaconf = _has_any(plain, OMEGACONFS)
            self.bases[overrides] = Base(pickle.dumps(cfg), None if needs_omegaconf else pickle.dumps(plain), choices)
        return self.bases[overrides]

    def _split(self, overrides: list[Override]) -> tuple[list[Override], tuple[str, ...]]:
        """Values to set on a copy, and lines for Hydra, each in their order. The copy's come last, so none of them may
        have stood before a line of Hydra's that touches it.
        """
        values: list[Override] = []
        rest: list[Override] = []
        for override in reversed(overrides):
            is_later = not any(self._touches(other, override.key_or_group) for other in rest)
            (values if self._is_plain(override) and is_later else rest).insert(0, override)
        return values, tuple(override.input_line or "" for override in rest)

    def _touches(self, override: Override, key: str) -> bool:
        """Whether it matters if a value of `key` is set before or after this."""
        value, other = override.value(), override.key_or_group
        if other in self.groups and not isinstance(value, dict):
            return False  # a choice of a group, which Hydra makes before it sets any value
        if _looks_first(override):
            return True  # what it finds may refer to any key
        return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")

    def _is_plain(self, override: Override) -> bool:
        """Whether it sets one value that cannot change what is composed."""
        key = override.key_or_group
        return (
            override.type == OverrideType.CHANGE
            and override.package is None
            and not override.is_sweep_override()
            and key not in self.groups
            and key.split(".")[0] not in ("hydra", "memory")
            and "/" not in key
            and "@" not in key
            and not isinstance(override.value(), dict)
        )


def _leaves_keys(path: Path) -> bool:
    try:
        return LEFT in path.read_text(encoding="utf-8")
    except UNREADABLE:  # who composes it says so
        return False


def _looks_first(override: Override) -> bool:
    """Whether the value found decides if Hydra takes it: `+key=value` wants none there, `~key=value` wants that one.

    In the nodes that hold whatever is put there (`+inference.vllm.NAME=value`) nothing refers to another key.
    """
    if override.key_or_group.startswith(OPEN_NODES):
        return False
    return (override.is_add() and not isinstance(override.value(), (dict, list))) or (
        override.is_delete() and override.value() is not None
    )


_kept: dict[str, tuple[object, Composer]] = {}


def composer_of(config_name: str) -> Composer:
    """The process's one for a job, made anew when a file that may be composed has changed."""
    state = state_of_files(conf_dir())
    if config_name not in _kept or _kept[config_name][0] != state:
        _kept[config_name] = state, Composer(config_name)
    return _kept[config_name][1]


OMEGACONFS = ("${", LEFT)  # a reference, and a value that is left to the user


def _set_plainly(base: bytes | None, overrides: Iterable[Override]) -> dict[str, Any] | None:
    """The dicts of `base` with these values; None where OmegaConf is to have the word: references, keys not there."""
    if base is None:
        return None
    plain: dict[str, Any] = pickle.loads(base)
    for override in overrides:
        *parents, key = override.key_or_group.split(".")
        node: Any = plain
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        value = override.value()
        if not isinstance(node, dict) or isinstance(node.get(key, {}), dict) or _has_any(value, OMEGACONFS):
            return None
        node[key] = value
    return plain


def _has_any(value: object, marks: Iterable[str]) -> bool:
    text = repr(value)
    return any(mark in text for mark in marks)
