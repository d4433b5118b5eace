"""Many points of one job, composed fast: Hydra reads the YAML once for each set of group choices, and plain values are
set on a copy of what it made.

Of a thousand points most differ in values alone. What is not plainly `key=value` on a key that is there (groups,
`+key`, `~key`, dicts, Hydra's own keys) goes to Hydra, and so does every point that fails, for its explanation.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from prl.config.composing import compose, compose_yaml, run_choices
from prl.config.errors import ConfigError
from prl.config.locate import config_groups
from prl.config.overrides import parse

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


class Composer:
    """Composes points of `config_name`. One object for a whole sweep."""

    def __init__(self, config_name: str) -> None:
        self.config_name = config_name
        self.groups = frozenset(config_groups())
        self.bases: dict[tuple[str, ...], tuple[bytes, dict[str, str]]] = {}

    def compose(self, overrides: list[str]) -> RunConfig:
        """As `prl.config.composing.compose`. Raises ConfigError with all problems found."""
        from prl.config.resolving import resolve

        parsed = parse(overrides)
        values = [override for override in parsed if self._is_plain(override)]
        rest = tuple(override.input_line or "" for override in parsed if not self._is_plain(override))
        try:
            pickled, choices = self._base(rest)
            cfg: DictConfig = pickle.loads(pickled)
            for override in values:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
        except (ConfigError, OmegaConfBaseException):
            return compose(overrides, self.config_name)
        return resolve(cfg, choices=choices)

    def _base(self, overrides: tuple[str, ...]) -> tuple[bytes, dict[str, str]]:
        """The config of these overrides without Hydra's node, pickled (a copy costs a quarter of `deepcopy`)."""
        if overrides not in self.bases:
            cfg = compose_yaml(list(overrides), self.config_name)
            choices = run_choices(cfg)
            with open_dict(cfg):
                del cfg["hydra"]
            self.bases[overrides] = (pickle.dumps(cfg), choices)
        return self.bases[overrides]

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
