"""What every `python -m prl.NAME` shares: Hydra in front, our errors instead of its traces, and exit codes.

0: done. 2: a mistake of the user, told without a traceback; nothing was started and no directory made. Else what the
job returned. A multirun is validated as a whole first; then its points run, and if any fails the exit code is 1.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from prl.config.composing import VERSION_BASE, current_choices, explain, problems
from prl.config.errors import ConfigError, UserError
from prl.config.hydra_setup import register
from prl.config.locate import conf_dir
from prl.config.overrides import alias_conflict, parse, swept_keys
from prl.config.sweep import compose_points, sweep_lines

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

Job = Callable[["RunConfig"], int]
INTERRUPTED = (130, 143)  # 128 + SIGINT, 128 + SIGTERM


@dataclass
class Session:
    """One call of an entry point: the job, and how its points ended."""

    job: Job
    swept: set[str] = field(default_factory=set)
    exit_code: int = 0
    error: Exception | None = None
    failed: dict[str, int] = field(default_factory=dict)  # point directory -> exit code

    def run_point(self, cfg: DictConfig) -> int:
        """Hydra's task function: one point, alone or as part of a multirun."""
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            return self._run_swept(cfg)
        from prl.config.resolving import resolve

        try:
            self.exit_code = self.job(resolve(cfg, choices=current_choices()))
        except Exception as error:  # kept from Hydra, which would print it in its own way; raised again by _run
            self.error = error
        return self.exit_code

    def _run_swept(self, cfg: DictConfig) -> int:
        """A point that fails is remembered, and the next one runs; an interrupted one ends the sweep."""
        from prl.config.point import point_label
        from prl.config.resolving import resolve

        sweep_dir = Path(HydraConfig.get().sweep.dir)
        config = resolve(cfg, choices=current_choices(), sweep=sweep_dir.name, swept=self._swept_values())
        output_dir = str(sweep_dir / point_label(config))
        try:
            code = self.job(config.model_copy(update={"output_dir": output_dir}))
        except UserError as error:
            print(error.render(), file=sys.stderr)
            code = 2
        except Exception:
            traceback.print_exc()
            code = 1
        if code in INTERRUPTED:
            raise SystemExit(code)
        if code:
            self.failed[output_dir] = code
        return code

    def _swept_values(self) -> dict[str, str]:
        overrides = parse(HydraConfig.get().overrides.task)
        return {
            o.get_key_element(): o.get_value_element_as_str() for o in overrides if o.get_key_element() in self.swept
        }


def run_app(job: Job, config_name: str, *, starts_nothing: bool = False) -> None:
    """Compose, validate, run; leaves by SystemExit.

    Args:
        job: takes a RunConfig, returns an exit code.
        config_name: the primary config in conf/.
        starts_nothing: the job only looks at its config, so a multirun needs no directory either.
    """
    args = get_args_parser().parse_args()
    name = args.config_name or config_name
    show_trace = os.environ.get("HYDRA_FULL_ERROR") == "1"
    try:
        sys.exit(_run(job, name, args.overrides, args.multirun, args.shell_completion, starts_nothing))
    except UserError as error:
        shown = error
    except (HydraException, OmegaConfBaseException) as error:
        if show_trace:
            traceback.print_exc()
        shown = explain(error, args.overrides, name)
    print(shown.render(), file=sys.stderr)
    sys.exit(2)


def _run(
    job: Job, config_name: str, overrides: list[str], multirun: bool, completing: bool, starts_nothing: bool
) -> int:
    register()
    session = Session(job)
    if not completing:
        conflict = alias_conflict(overrides)
        if conflict:
            raise ConfigError(conflict)
    if multirun:
        found = problems(overrides, config_name)
        if found:
            raise ConfigError(found)
        lines = sweep_lines(overrides, config_name)
        session.swept = set(swept_keys(lines))
        points = compose_points(lines, config_name)
        if starts_nothing:
            return max(job(point) for point in points)
    _run_hydra(session, config_name)
    if session.error is not None:
        raise session.error
    for output_dir, code in session.failed.items():
        print(f"point failed with exit code {code}: {output_dir}", file=sys.stderr)
    return 1 if session.failed else session.exit_code


def _run_hydra(session: Session, config_name: str) -> None:
    """Hydra reports an exception itself and exits with 1, unless this variable lets it pass."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(conf_dir()), config_name=config_name, version_base=VERSION_BASE)(session.run_point)()
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
