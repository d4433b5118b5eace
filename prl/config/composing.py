"""Composition through Hydra's compose API, and Hydra's refusals in the user's terms."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from prl.config.errors import ConfigError, UserError
from prl.config.hydra_setup import in_hydras_terms, register
from prl.config.locate import conf_dir
from prl.config.overrides import alias_conflict, choices_of, diagnose, parse

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

VERSION_BASE = "1.3"


def compose_yaml(overrides: list[str], config_name: str = "rl") -> DictConfig:
    """The composed config with Hydra's node. Raises ConfigError for overrides that Hydra refuses."""
    try:
        with _hydra():
            cfg = hydra_compose(config_name=config_name, overrides=in_hydras_terms(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides, config_name) from error
    conflict = alias_conflict(overrides)
    if conflict:
        raise ConfigError(conflict)
    return cfg


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra on our conf/, also from within a running Hydra application."""
    register()
    outer = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(config_dir=str(conf_dir()), version_base=VERSION_BASE):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def compose(overrides: list[str], config_name: str = "rl") -> RunConfig:
    """The RunConfig of a command line. Raises ConfigError with all problems found."""
    from prl.config.resolving import resolve

    cfg = compose_yaml(overrides, config_name)
    choices = run_choices(cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    return resolve(cfg, choices=choices)


def run_choices(cfg: DictConfig) -> dict[str, str]:
    """Group -> choice as selected. A list (`env=[a,b]`) is no group choice to Hydra; it is taken from the overrides."""
    runtime = {str(k): str(v) for k, v in cfg.hydra.runtime.choices.items()}
    choices = {k: v for k, v in runtime.items() if "/" not in k and k not in ("memory", "local", "sweeps")}
    for override in parse(cfg.hydra.overrides.task):
        if isinstance(override.value(), list) and override.key_or_group in _LIST_GROUPS:
            choices[override.key_or_group] = "+".join(choices_of(override))
    return dict(sorted(choices.items()))


_LIST_GROUPS = ("env",)


def current_choices() -> dict[str, str]:
    """`run_choices` of the Hydra job that runs now."""
    return run_choices(OmegaConf.create({"hydra": HydraConfig.get()}))


def explain(error: Exception, overrides: list[str], config_name: str) -> ConfigError:
    """Every problem with the overrides; Hydra's own message where none of them is to blame."""
    try:
        found = problems(overrides, config_name)
    except UserError as unreadable:
        found = [unreadable]
    if not found:
        cause = error.__cause__ or error
        text = str(error) or str(cause)
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        found = [
            UserError(lines[0] if lines else repr(cause), where=f"conf/{config_name}.yaml", why=" ".join(lines[1:4]))
        ]
    return ConfigError(found)


def problems(overrides: list[str], config_name: str) -> list[UserError]:
    """What is wrong with the overrides, judged by the job's config without them: the schema is wider than one job."""
    with _hydra():
        base = hydra_compose(config_name=config_name, return_hydra_config=True)
    groups = {str(group) for group in base.hydra.runtime.choices if "/" not in str(group)} - {"local"}
    with open_dict(base):
        del base["hydra"]
    return diagnose(overrides, set(_dotted(base)), groups)


def _dotted(cfg: DictConfig, prefix: str = "") -> list[str]:
    keys = []
    for key in map(str, cfg):
        keys.append(f"{prefix}{key}")
        node = cfg._get_node(key)
        if isinstance(node, DictConfig) and not node._is_none() and not node._is_interpolation():
            keys += _dotted(node, f"{prefix}{key}.")
    return keys
