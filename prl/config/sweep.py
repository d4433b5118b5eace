"""A multirun before it starts: its points, and everything wrong with any of them, before anything is launched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

from prl.config.composing import compose, compose_yaml
from prl.config.errors import ConfigError, UserError
from prl.config.overrides import parse, swept_keys

if TYPE_CHECKING:
    from prl.config.schema import RunConfig


def sweep_lines(overrides: list[str], config_name: str) -> list[str]:
    """The overrides and `hydra.sweeper.params`, which a sweep kept as YAML uses instead of the command line."""
    fixed = [override.input_line or "" for override in parse(overrides) if not override.is_sweep_override()]
    params = compose_yaml(fixed, config_name).hydra.sweeper.get("params") or {}
    return [*(f"{key}={value}" for key, value in params.items()), *overrides]


def expand(lines: list[str]) -> list[list[str]]:
    """The overrides of every point, in the order in which Hydra's basic sweeper numbers them."""
    return BasicSweeper.split_arguments(parse(lines), max_batch_size=None)[0]


def compose_points(lines: list[str], config_name: str) -> list[RunConfig]:
    """Every point of a sweep, resolved.

    Raises:
        ConfigError: with the violations of all points, each told once with the first point that has it.
    """
    swept = set(swept_keys(lines))
    found: dict[str, UserError] = {}
    configs = []
    for point in expand(lines):
        try:
            configs.append(compose(point, config_name))
        except ConfigError as error:
            label = " ".join(line for line in point if line.partition("=")[0] in swept)
            for violation in error.violations:
                found.setdefault(violation.render(), _at_point(violation, label))
    if any(config.output_dir is not None for config in configs):
        found["output_dir"] = UserError(
            "The points of a sweep cannot share one output_dir.",
            where="output_dir",
            why="each point gets its own directory under the sweep's",
            fix="hydra.sweep.dir=outputs/sweeps/NAME instead of output_dir",
        )
    if found:
        raise ConfigError(list(found.values()))
    return configs


def _at_point(violation: UserError, label: str) -> UserError:
    where = f"{violation.where} (first in the point {label})" if label else violation.where
    return UserError(violation.what, where=where, why=violation.why, fix=violation.fix)
