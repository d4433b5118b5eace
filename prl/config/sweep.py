"""A multirun before it starts: its points, and everything wrong with any of them, before anything is launched."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.types import IntervalSweep, Override

from prl.config.composer import Composer
from prl.config.composing import compose_yaml
from prl.config.errors import ConfigError, UserError
from prl.config.hydra_setup import in_hydras_terms
from prl.config.locate import sweep_files
from prl.config.overrides import IN_POINT, choices_of, empty_axes, name_of_axis, parse, passed_over, swept_keys

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from prl.config.schema import RunConfig

MOST_CHECKED = 20  # values of one axis, for sweepers that make up their points


def sweep_lines(overrides: list[str], config_name: str) -> list[str]:
    """The overrides and `hydra.sweeper.params`, which a sweep kept as YAML (`+sweep=NAME`) uses instead of the command
    line. A key that the command line gives as well is the command line's. In the order of Hydra's own sweeper.

    Raises:
        ConfigError: for a sweep that does not exist, or several at once.
    """
    parsed = parse(overrides)
    _check_sweep_name(parsed)
    if said := next((o for o in parsed if o.key_or_group == "hydra.sweeper.params"), None):
        raise ConfigError(
            [
                UserError(
                    "hydra.sweeper.params is for files.",
                    where=str(said.input_line),
                    why="Hydra puts no object in its place on a command line, where axes stand by themselves",
                    fix="the axes as 'optim.lr=interval(1e-4,1e-3)', or a file in sweeps/ with them: +sweep=NAME",
                )
            ]
        )
    fixed = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
    params = compose_yaml(fixed, config_name).hydra.sweeper.get("params") or {}
    given = {override.get_key_element(): override.input_line or "" for override in parsed}
    swept = [given.get(key, f"{key}={value}") for key, value in params.items()]
    if found := empty_axes(swept):
        raise ConfigError(found)
    return in_hydras_terms([*swept, *(line for key, line in given.items() if key not in params)])


def _check_sweep_name(parsed: list[Override]) -> None:
    names = [name for override in parsed if override.get_key_element() == "+sweep" for name in choices_of(override)]
    known = sorted(sweep_files())
    if len(names) > 1:
        raise ConfigError([UserError(f"Several sweeps at once: {', '.join(names)}.", where="+sweep", fix="take one")])
    if names and names[0] not in known:
        if (passed := passed_over("sweeps", names[0])) is not None:
            raise ConfigError([passed.error(f"+sweep={names[0]}")])
        close = difflib.get_close_matches(names[0], known, n=1, cutoff=0.5)
        guess = f" Did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            [
                UserError(
                    f"There is no sweep {names[0]!r}.{guess}",
                    where=f"+sweep={names[0]}",
                    why=f"sweeps/ has: {', '.join(known)}",
                    fix=f"+sweep={close[0]}" if close else f"sweep={names[0]}, if it is to be a sweep's name",
                )
            ]
        )


def expand(lines: list[str]) -> list[list[str]]:
    """The overrides of every point, in the order in which Hydra's basic sweeper numbers them.

    Raises UserError for a continuous interval, which a grid cannot have.
    """
    intervals = [line for line, override in zip(lines, parse(lines), strict=True) if override.is_interval_sweep()]
    if intervals:
        raise UserError(
            "A grid has no points between two numbers.",
            where=" ".join(intervals),
            why="only a sweeper that chooses points itself can search an interval",
            fix="name the values, as key=1e-4,1e-3, or take such a sweeper: hydra/sweeper=optuna",
        )
    return BasicSweeper.split_arguments(parse(lines), max_batch_size=None)[0]


def launcher_of(lines: list[str], config_name: str) -> DictConfig:
    """The node hydra.launcher of a sweep, which is the same for all of its points."""
    fixed = [override.input_line or "" for override in parse(lines) if not override.is_sweep_override()]
    return compose_yaml(fixed, config_name).hydra.launcher


def makes_a_grid(lines: list[str], config_name: str) -> bool:
    """Whether the sweeper is Hydra's basic one, whose points are known in advance, and not one that makes them up."""
    if not any(line.startswith(("hydra/sweeper=", "hydra.sweeper._target_=")) for line in lines):
        return True
    fixed = [override.input_line or "" for override in parse(lines) if not override.is_sweep_override()]
    return str(compose_yaml(fixed, config_name).hydra.sweeper["_target_"]).endswith(("PointSweeper", "BasicSweeper"))


def corners(lines: list[str]) -> list[list[str]]:
    """Points that a sweeper may make up of these axes: each value of each axis (of an interval, both ends) beside the
    first ones of the others. Checked in advance in place of all that could come.
    """
    fixed = [line for line, override in zip(lines, parse(lines), strict=True) if not override.is_sweep_override()]
    axes = [_values_of(override) for override in parse(lines) if override.is_sweep_override()]
    first = [values[0] for values in axes]
    points = [[*first[:i], value, *first[i + 1 :]] for i, values in enumerate(axes) for value in values[bool(i) :]]
    return [[*point, *fixed] for point in points or [[]]]


def _values_of(override: Override) -> list[str]:
    """`key=value` of each value of an axis; of an interval its ends, of a long range a few."""
    if override.is_interval_sweep():
        interval = override.value()
        assert isinstance(interval, IntervalSweep)
        values = [str(interval.start), str(interval.end)]
    else:
        values = list(override.sweep_string_iterator())
    few = values if len(values) <= MOST_CHECKED else [*values[: MOST_CHECKED - 1], values[-1]]
    return [f"{override.get_key_element()}={value}" for value in few]


def compose_points(lines: list[str], config_name: str) -> list[RunConfig]:
    """Every point of a sweep, resolved.

    Raises:
        ConfigError: with the violations of all points, each told once with the first point that has it.
    """
    return resolve_points(expand(lines), config_name, set(swept_keys(lines)))


def resolve_points(points: list[list[str]], config_name: str, swept: set[str]) -> list[RunConfig]:
    """As `compose_points`, for points that are expanded already."""
    composer = Composer(config_name)
    found: dict[str, UserError] = {}
    configs = []
    for point in points:
        try:
            configs.append(composer.compose(point))
        except ConfigError as error:
            label = " ".join(name_of_axis(line) for line in point if line.partition("=")[0] in swept)
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


def refuse_equal_points(points: list[list[str]], configs: list[RunConfig]) -> None:
    """Raise ConfigError for points that compute the same, however they are written: a name alone makes no other run.
    What SLURM is asked for may be an axis.
    """
    from prl.config.point import point_id  # pydantic: completion does without it

    seen: dict[tuple[str, str], list[str]] = {}
    found = []
    for lines, config in zip(points, configs, strict=True):
        name = point_id(config)
        first = seen.setdefault((name, config.slurm.model_dump_json()), lines)
        if first is not lines:
            found.append(
                UserError(
                    "Two points of the sweep are the same.",
                    where=" ".join(lines),
                    why=f"it computes what {' '.join(first)} computes: both are the point {name}",
                    fix="leave one of them out; to repeat a run, sweep over seed",
                )
            )
    if found:
        raise ConfigError(found)


def _at_point(violation: UserError, label: str) -> UserError:
    where = f"{violation.where}{IN_POINT}{label})" if label else violation.where
    return UserError(violation.what, where=where, why=violation.why, fix=violation.fix)
