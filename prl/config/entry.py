"""What every `python -m prl.NAME` shares: Hydra in front, our errors instead of its traces, and exit codes.

0: done. 2: a mistake of the user, told without a traceback; nothing was started and no directory made. Else what the
job returned. A multirun is validated as a whole first; then its points run, and if any fails the exit code is 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from prl.config.composing import VERSION_BASE, current_choices, explain, problems
from prl.config.errors import ConfigError, PointFailedError, UserError
from prl.config.hydra_setup import SWEEP_OPTION, in_hydras_terms, name_sweep, register
from prl.config.locate import conf_dir
from prl.config.overrides import alias_conflict, swept_keys
from prl.config.sweep import corners, expand, makes_a_grid, resolve_points, sweep_lines

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

Job = Callable[["RunConfig"], int]


@dataclass
class Session:
    """One call of an entry point: the job, and how its points ended."""

    job: Job
    config_name: str = "rl"
    is_frozen: bool = False  # whether a point can be started from its plan.json alone, elsewhere and later
    swept: set[str] = field(default_factory=set)
    points: dict[tuple[str, ...], RunConfig] = field(default_factory=dict)  # overrides -> point, of a multirun
    exit_code: int = 0
    error: Exception | None = None
    failed: dict[str, int] = field(default_factory=dict)  # point directory -> exit code

    def run_point(self, cfg: DictConfig) -> int:
        """Hydra's task function: a run alone. The points of a multirun go past it, to the launcher."""
        from prl.config.resolving import resolve

        try:
            self.exit_code = self.job(resolve(cfg, choices=current_choices()))
        except Exception as error:  # kept from Hydra, which would print it in its own way; raised again by _run
            self.error = error
        return self.exit_code

    def configs_of(self, batch: Sequence[tuple[str, ...]], sweep_dir: Path) -> list[RunConfig]:
        """The points of these overrides, each with its directory. Raises ConfigError for what was not composed before
        (by a sweeper that makes up its points) and is wrong.
        """
        new = [list(lines) for lines in batch if point_key(lines) not in self.points]
        self.points |= zip(map(point_key, new), resolve_points(new, self.config_name, self.swept), strict=True)
        return [self._placed(self.points[point_key(lines)], lines, sweep_dir) for lines in batch]

    def _placed(self, config: RunConfig, overrides: tuple[str, ...], sweep_dir: Path) -> RunConfig:
        from prl.config.point import point_label

        pairs = [line.partition("=")[::2] for line in overrides]
        swept = {key: value for key, value in pairs if key in self.swept}
        config = config.model_copy(update={"sweep": sweep_dir.name, "swept": swept})
        return config.model_copy(update={"output_dir": str(sweep_dir / point_label(config))})


def point_key(overrides: Iterable[str]) -> tuple[str, ...]:
    """What tells points apart: Hydra gives its launchers the overrides without its own."""
    lines = in_hydras_terms(list(overrides))
    return tuple(sorted(line for line in lines if not line.startswith(("hydra.", "hydra/"))))


def run_app(job: Job, config_name: str, *, starts_nothing: bool = False, is_frozen: bool = False) -> None:
    """Compose, validate, run; leaves by SystemExit.

    Args:
        job: takes a RunConfig, returns an exit code.
        config_name: the primary config in conf/.
        starts_nothing: the job only looks at its config, so a multirun needs no directory either.
        is_frozen: the job is a run that its plan.json describes, so that a launcher may start it elsewhere.
    """
    args = get_args_parser().parse_args()
    name = args.config_name or config_name
    show_trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        session = Session(job, name, is_frozen)
        sys.exit(_run(session, args.overrides, args.multirun, args.shell_completion, starts_nothing))
    except UserError as error:
        shown = error
    except (HydraException, OmegaConfBaseException) as error:
        if show_trace:
            traceback.print_exc()
        shown = explain(error, args.overrides, name)
    print(shown.render(), file=sys.stderr)
    sys.exit(2)


def _run(session: Session, overrides: list[str], multirun: bool, completing: bool, starts_nothing: bool) -> int:
    register()
    if not completing:
        conflict = alias_conflict(overrides)
        if conflict:
            raise ConfigError(conflict)
    if not multirun and not completing and any(line.startswith(SWEEP_OPTION) for line in overrides):
        raise UserError(
            "A sweep needs -m.", where="+sweep", why="without it one point would run, and no axis", fix="-m +sweep=NAME"
        )
    if multirun:
        found = problems(overrides, session.config_name)
        if found:
            raise ConfigError(found)
        lines = sweep_lines(overrides, session.config_name)
        session.swept = set(swept_keys(lines))
        points = expand(lines) if makes_a_grid(lines, session.config_name) else corners(lines)
        configs = resolve_points(points, session.config_name, session.swept)
        if starts_nothing:
            return max(session.job(config) for config in configs)
        session.points = dict(zip(map(point_key, points), configs, strict=True))
        register_launcher()
        name_sweep(session.config_name, lines)
    try:
        _run_hydra(session)
    except PointFailedError as error:  # more than the sweeper puts up with
        print(error.render(), file=sys.stderr)
        session.exit_code = 1
    if session.error is not None:
        raise session.error
    for output_dir, code in session.failed.items():
        print(f"point failed with exit code {code}: {output_dir}", file=sys.stderr)
    return 1 if session.failed else session.exit_code


def register_launcher() -> None:
    """Here, at the one place where configuration meets what starts it."""
    from launch.hydra_plugin import register_plugins

    register_plugins()


def _run_hydra(session: Session) -> None:
    """Hydra reports an exception itself and exits with 1, unless this variable lets it pass."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        front = hydra.main(config_path=str(conf_dir()), config_name=session.config_name, version_base=VERSION_BASE)
        front(session.run_point)()
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
