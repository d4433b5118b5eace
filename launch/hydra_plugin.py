"""What Hydra sees: a launcher for points that are composed already, and the basic sweeper without a second validation.

Hydra instantiates plugins of the package `hydra_plugins` alone, by import, and only those it knows. So
`register_plugins` makes this module importable as `hydra_plugins.prl` too, and the two classes known.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from launch.submitit_nodes import register_nodes
from prl.config.errors import ConfigError, PointFailedError, UserError

Plugins.instance()  # reads all plugins, and executes modules of theirs that are imported already once more
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

if TYPE_CHECKING:
    from launch.session import Session
    from launch.settings import LauncherSettings

MODULE = "hydra_plugins.prl"
RECORD = "multirun.yaml"  # which Hydra writes into the sweep's directory


class PointSweeper(BasicSweeper):
    """Hydra's own validation composes every point from YAML once more: a minute for a thousand."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: `prl.config.sweep.compose_points` has told all problems of all points."""

    def sweep(self, arguments: list[str]) -> Any:
        """Beside what the launcher does, it writes the sweep's multirun.yaml."""
        from launch.places import telling_places

        assert self.config is not None
        with telling_places(Path(self.config.hydra.sweep.dir)):
            return super().sweep(arguments)


class PointLauncher(Launcher):
    """Runs points on this machine, or submits them to SLURM; see conf/hydra/launcher."""

    @staticmethod
    def read(node: Mapping[str, Any]) -> LauncherSettings:
        """What its node says. Raises ConfigError."""
        from launch.settings import read_settings

        return read_settings(node)

    def __init__(self, **node: Any) -> None:
        self.node = node
        self.session: Session | None = None
        self.sweep_dir = Path()
        self.waits = False
        self.made: list[Path] = []  # what Hydra makes for the sweep before any point is launched

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from launch.session import Session
        from prl.runtime.preflight import check_directory

        session = task_function.__self__  # type: ignore[attr-defined]
        assert isinstance(session, Session), "only the entry points of prl start this launcher"
        self.session, self.sweep_dir = session, Path(config.hydra.sweep.dir).absolute()
        check_directory(self.sweep_dir, "hydra.sweep.dir", "hydra.sweep.dir=outputs/sweeps/mine")
        self.read(self.node)
        ours = (self.sweep_dir / RECORD, self.sweep_dir, *self.sweep_dir.parents)
        self.made = [path for path in ours if not path.exists()]
        sweeper = str(config.hydra.sweeper["_target_"])
        self.waits = not sweeper.endswith((PointSweeper.__name__, BasicSweeper.__name__))  # it wants results to go on

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """All points of the batch. Returns their objectives where the sweeper waits; a failure raises when read."""
        from launch.launching import launch_points
        from launch.places import telling_places

        assert self.session is not None
        batch = [tuple(line) for line in job_overrides]
        try:
            with telling_places(self.sweep_dir):
                values = launch_points(self.session, batch, self.sweep_dir, self.read(self.node), self.waits)
        except UserError:
            self._remove_what_hydra_made()
            raise
        return [self._result(list(line), value) for line, value in zip(job_overrides, values, strict=True)]

    def _remove_what_hydra_made(self) -> None:
        """Of a sweep that was refused: its record, its lock, and directories, unless there is more in them."""
        from launch.launching import SUBMIT_LOCK

        if self.sweep_dir.is_dir() and {path.name for path in self.sweep_dir.iterdir()} <= {RECORD, SUBMIT_LOCK}:
            (self.sweep_dir / SUBMIT_LOCK).unlink(missing_ok=True)
            for path in self.made:
                with contextlib.suppress(OSError):
                    path.unlink() if path.name == RECORD else path.rmdir()

    def _result(self, overrides: list[str], value: float | PointFailedError | None) -> JobReturn:
        state = JobStatus.FAILED if isinstance(value, PointFailedError) else JobStatus.COMPLETED
        result = JobReturn(overrides=overrides, working_dir=str(self.sweep_dir), status=state)
        result.return_value = value
        return result


class SubmititSlurmLauncher(PointLauncher):
    """Told in the words of hydra-submitit-launcher."""

    @staticmethod
    def read(node: Mapping[str, Any]) -> LauncherSettings:
        from launch.submitit_keys import slurm_settings

        return slurm_settings(node)


class SubmititLocalLauncher(PointLauncher):
    """As SubmititSlurmLauncher, on this machine."""

    @staticmethod
    def read(node: Mapping[str, Any]) -> LauncherSettings:
        from launch.submitit_keys import local_settings

        return local_settings(node)


LAUNCHERS = {kind.__name__: kind for kind in (PointLauncher, SubmititSlurmLauncher, SubmititLocalLauncher)}
PLUGINS: tuple[type[Plugin], ...] = (PointSweeper, *LAUNCHERS.values())
for plugin in PLUGINS:
    plugin.__module__ = MODULE


def register_plugins() -> None:
    """Make all known to Hydra. Safe to call again."""
    sys.modules[MODULE] = sys.modules[__name__]
    plugins = Plugins.instance()
    if f"{MODULE}.{PointLauncher.__name__}" not in plugins.class_name_to_class:
        for plugin in PLUGINS:
            plugins.register(plugin)
    register_nodes()


def settings_of(node: Mapping[str, Any]) -> LauncherSettings:
    """Of a whole node hydra.launcher, as Hydra composed it. Raises ConfigError, also for one of others."""
    target = str(node.get("_target_"))
    module, _, name = target.rpartition(".")
    if module != MODULE or name not in LAUNCHERS:
        raise ConfigError(
            [
                UserError(
                    "This launcher cannot start what prl starts.",
                    where="hydra/launcher",
                    why=f"{target} calls Python functions; here it is processes of a frozen plan that start",
                    fix="hydra/launcher=local, slurm, submitit_local or submitit_slurm",
                )
            ]
        )
    return LAUNCHERS[name].read({key: value for key, value in node.items() if key != "_target_"})
