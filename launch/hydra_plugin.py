"""Where Hydra enters: its task function, a launcher for points that are composed already, and the basic sweeper without
a second validation.

Hydra instantiates plugins of the package `hydra_plugins` alone, by import, and only those it knows. So
`register_plugins` makes this module importable as `hydra_plugins.prl` too, and its classes known.

Every command imports this module, and --cfg, --help and completion need no more of launch/ than it: what is imported
in functions here brings the schema (pydantic) and the planner, which take 0.3 s.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core import plugins
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.plugins.plugin import Plugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, ListConfig

from launch.places import telling_places
from launch.session import Session
from launch.submitit_nodes import MODULE, OURS, register_nodes
from prl.config.composing import current_choices, task_overrides
from prl.config.errors import ConfigError, PointFailedError, UserError

Plugins.instance()  # reads all plugins, and executes modules of theirs that are imported already once more
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper  # noqa: E402

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

RECORD = "multirun.yaml"  # which Hydra's own sweeper (hydra/sweeper=basic) writes into the sweep's directory


class Task:
    """Of a session, what Hydra calls with a composed configuration."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def run(self, cfg: DictConfig) -> int:
        """Hydra's task function: a run alone. The points of a multirun go past it, to the launcher."""
        from prl.config.resolving import resolve

        session = self.session
        try:
            config = resolve(cfg, choices=current_choices())
            if session.starts_nothing:
                refuse_launcher(HydraConfig.get().launcher, [config])
            if session.starts_nothing or not self._launched(config):
                session.exit_code = session.job(config)
        except Exception as error:  # kept from Hydra, which would print it in its own way; raised again by prl.entry
            session.error = error
        return session.exit_code

    def _launched(self, config: RunConfig) -> bool:
        """Whether a launcher was asked for that does not run it here and now."""
        from launch.reading import settings_of

        node = HydraConfig.get()
        settings = settings_of(node.launcher)
        if settings.mode != "slurm" and not settings.dry_run:
            if settings.asked:
                refuse_launcher(node.launcher, [config])
            if settings.timeout_min is not None:
                stop_after(settings.timeout_min)
            return False
        from launch.launching import launch_alone

        launch_alone(self.session, tuple(task_overrides(node)), config, settings)
        return True


def stop_after(minutes: float) -> None:
    """This process, which is the run: as from outside, so that it saves a checkpoint and ends."""

    def stop() -> None:
        print(f"stopped after {minutes:g} minutes", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(60 * minutes, stop)
    timer.daemon = True
    timer.start()


def of_a_plugin(error: BaseException) -> UserError | None:
    """What to tell of an error with which Hydra says that it has no such plugin; None for any other."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or frames[-1].filename != plugins.__file__:
        return None
    return UserError(
        "Hydra has no such launcher or sweeper.",
        where="hydra/launcher, hydra/sweeper",
        why=str(error).partition("\n")[0],
        fix="hydra/launcher=local, slurm, submitit_local or submitit_slurm; a sweeper of a package that is installed",
    )


def of_a_sweeper(error: BaseException) -> UserError | None:
    """What to tell of an error inside a sweeper's package, which knows what its keys may be; None for any other."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    own = [index for index, name in enumerate(files) if Path(name).parent == Path(__file__).parent]
    theirs = [index for index, name in enumerate(files) if "hydra_plugins" in Path(name).parts]
    if not theirs or max(own, default=-1) > max(theirs):
        return None
    return UserError(
        "The sweeper ended with an error of its own.",
        where=f"hydra/sweeper, {Path(files[max(theirs)]).parent.name}",
        why=f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__} in {files[-1]}",
        fix="the keys of hydra.sweeper and the intervals as its package wants them; with --cfg hydra in place of -m "
        "this command shows these keys",
    )


def refuse_objectives(sweeper: DictConfig) -> None:
    """Raises ConfigError for a sweeper that wants several numbers of each point."""
    asked = sweeper.get("direction")
    if not isinstance(asked, ListConfig) or len(asked) < 2:
        return
    from prl.config.keys import as_override

    raise ConfigError(
        [
            UserError(
                f"A point has one number to learn from, not {len(asked)}.",
                where=f"hydra.sweeper.direction={as_override(list(asked))}",
                why="it is the held-out reward (rl, eval), the held-out loss (sft) or tokens/s (bench)",
                fix=f"hydra.sweeper.direction={asked[0]}",
            )
        ]
    )


def refuse_launcher(node: DictConfig, configs: Sequence[RunConfig]) -> None:
    """For a command that only looks: raise ConfigError for what a submission of these points would refuse of the node
    hydra.launcher, whatever this machine has.
    """
    from launch.reading import settings_of
    from launch.submitit_keys import refuse_asked

    found: dict[str, UserError] = {}
    checks: list[Callable[[], object]] = [functools.partial(settings_of, node)]
    checks += [functools.partial(refuse_asked, node, config) for config in configs]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found |= {told.what: told for told in error.violations if told.what not in found}
    if found:
        raise ConfigError(list(found.values()))


class PointSweeper(BasicSweeper):
    """Hydra's own validation composes every point from YAML once more: a minute for a thousand."""

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Nothing: `prl.config.sweep.compose_points` has told all problems of all points."""

    def sweep(self, arguments: list[str]) -> Any:
        """As Hydra's, without its multirun.yaml in the sweep's directory, which may be the one of the command: commands
        and points stand in sweep.json, and whole configurations in the points' plans.
        """
        assert self.config is not None
        assert self.launcher is not None
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        lines = parser.parse_overrides([*self._parse_config(), *arguments])
        self.overrides = self.split_arguments(lines, self.max_batch_size)
        sweep_dir = Path(self.config.hydra.sweep.dir)
        results: list[Sequence[JobReturn]] = []
        with telling_places(sweep_dir):
            sweep_dir.mkdir(parents=True, exist_ok=True)
            while not self.is_done():
                batch = self.get_job_batch()
                results.append(self.launcher.launch(batch, initial_job_idx=sum(map(len, results))))
                for result in results[-1]:
                    _ = result.return_value  # raises what the point raised
        return results


class PointLauncher(Launcher):
    """Runs points on this machine, or submits them to SLURM; see conf/hydra/launcher."""

    def __init__(self, **node: Any) -> None:
        self.node = {"_target_": f"{MODULE}.{type(self).__name__}", **node}
        self.session: Session | None = None
        self.sweep_dir = Path()
        self.waits = False
        self.made: list[Path] = []  # what Hydra makes for the sweep before any point is launched

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        from launch.reading import settings_of
        from prl.runtime.preflight import check_directory

        task = task_function.__self__  # type: ignore[attr-defined]
        assert isinstance(task, Task), "only the entry points of prl start this launcher"
        self.session, self.sweep_dir = task.session, Path(config.hydra.sweep.dir).absolute()
        check_directory(self.sweep_dir, "hydra.sweep.dir", "hydra.sweep.dir=outputs/sweeps/mine")
        refuse_objectives(config.hydra.sweeper)
        settings_of(self.node)  # what is wrong is told before anything is made
        ours = (self.sweep_dir / RECORD, self.sweep_dir, *self.sweep_dir.parents)
        self.made = [path for path in ours if not path.exists()]
        sweeper = str(config.hydra.sweeper["_target_"])
        self.waits = not sweeper.endswith((PointSweeper.__name__, BasicSweeper.__name__))  # it wants results to go on

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """All points of the batch. Returns their objectives where the sweeper waits; a failure raises when read."""
        from launch.launching import launch_points
        from launch.reading import settings_of

        assert self.session is not None
        batch = [tuple(line) for line in job_overrides]
        try:
            with telling_places(self.sweep_dir):
                values = launch_points(self.session, batch, self.sweep_dir, settings_of(self.node), self.waits)
        except UserError:
            self._remove_what_hydra_made()
            raise
        return [self._result(list(line), value) for line, value in zip(job_overrides, values, strict=True)]

    def _remove_what_hydra_made(self) -> None:
        """Of a sweep that was refused: its record, its lock, and directories, unless there is more in them."""
        from launch.submitting import SUBMIT_LOCK

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


class SubmititLocalLauncher(PointLauncher):
    """As SubmititSlurmLauncher, on this machine."""


PLUGINS: tuple[type[Plugin], ...] = (PointSweeper, PointLauncher, SubmititSlurmLauncher, SubmititLocalLauncher)
for plugin in PLUGINS:
    plugin.__module__ = MODULE


def register_plugins() -> None:
    """Make all known to Hydra. Safe to call again."""
    sys.modules[MODULE] = sys.modules[__name__]
    known = Plugins.instance()
    if f"{MODULE}.{PointLauncher.__name__}" not in known.class_name_to_class:
        for plugin in PLUGINS:
            known.register(plugin)
        for theirs, ours in OURS.items():  # in nodes of people's own
            known.class_name_to_class[theirs] = known.class_name_to_class[f"{MODULE}.{ours}"]
    register_nodes()
