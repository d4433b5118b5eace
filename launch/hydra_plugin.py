"""What Hydra sees: a launcher for points that are composed already, and the basic sweeper without a second validation.

Hydra instantiates plugins of the package `hydra_plugins` alone, by import, and only those it knows. So
`register_plugins` makes this module importable as `hydra_plugins.prl` too, and the two classes known.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from prl.config.errors import PointFailedError

if TYPE_CHECKING:
    from prl.config.entry import Session

MODULE = "hydra_plugins.prl"


class PointSweeper(BasicSweeper):
    """Hydra's own validation composes every point from YAML once more: a minute for a thousand."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: `prl.config.sweep.compose_points` has told all problems of all points."""


class PointLauncher(Launcher):
    """Runs points on this machine, or submits them to SLURM; see conf/hydra/launcher."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.session: Session | None = None
        self.sweep_dir = Path()
        self.waits = False

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from prl.config.entry import Session

        session = task_function.__self__  # type: ignore[attr-defined]
        assert isinstance(session, Session), "only the entry points of prl start this launcher"
        self.session, self.sweep_dir = session, Path(config.hydra.sweep.dir).absolute()
        sweeper = str(config.hydra.sweeper["_target_"])
        self.waits = not sweeper.endswith((PointSweeper.__name__, BasicSweeper.__name__))  # it wants results to go on

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """All points of the batch. Returns their objectives where the sweeper waits; a failure raises when read."""
        from launch.launching import launch_points
        from launch.settings import LauncherSettings

        assert self.session is not None
        plain = OmegaConf.to_container(OmegaConf.create(self.settings), resolve=True)
        settings, batch = LauncherSettings.model_validate(plain), [tuple(line) for line in job_overrides]
        values = launch_points(self.session, batch, self.sweep_dir, settings, self.waits)
        return [self._result(list(line), value) for line, value in zip(job_overrides, values, strict=True)]

    def _result(self, overrides: list[str], value: float | PointFailedError | None) -> JobReturn:
        state = JobStatus.FAILED if isinstance(value, PointFailedError) else JobStatus.COMPLETED
        result = JobReturn(overrides=overrides, working_dir=str(self.sweep_dir), status=state)
        result.return_value = value
        return result


PointSweeper.__module__ = PointLauncher.__module__ = MODULE


def register_plugins() -> None:
    """Make both known to Hydra. Safe to call again."""
    sys.modules[MODULE] = sys.modules[__name__]
    plugins = Plugins.instance()
    if f"{MODULE}.{PointLauncher.__name__}" not in plugins.class_name_to_class:
        plugins.register(PointLauncher)
        plugins.register(PointSweeper)
