"""One call of an entry point: the job, the points of its multirun, and how they ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from prl.config.composing import current_choices, task_overrides
from prl.config.hydra_setup import in_hydras_terms
from prl.config.sweep import resolve_points

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

Job = Callable[["RunConfig"], int]


@dataclass
class Session:
    """One call of an entry point: the job, and how its points ended."""

    job: Job
    config_name: str = "rl"
    is_frozen: bool = False  # whether a point can be started from its plan.json alone, elsewhere and later
    starts_nothing: bool = False
    swept: set[str] = field(default_factory=set)
    points: dict[tuple[str, ...], RunConfig] = field(default_factory=dict)  # overrides -> point, of a multirun
    exit_code: int = 0
    error: Exception | None = None
    failed: dict[str, int] = field(default_factory=dict)  # point directory -> exit code

    def run_point(self, cfg: DictConfig) -> int:
        """Hydra's task function: a run alone. The points of a multirun go past it, to the launcher."""
        from prl.config.resolving import resolve

        try:
            config = resolve(cfg, choices=current_choices())
            if not self.starts_nothing and self._launched(config):
                return self.exit_code
            self.exit_code = self.job(config)
        except Exception as error:  # kept from Hydra, which would print it in its own way; raised again by _run
            self.error = error
        return self.exit_code

    def _launched(self, config: RunConfig) -> bool:
        """Whether a launcher was asked for that does not run it here and now."""
        from launch.hydra_plugin import settings_of

        hydra_config = HydraConfig.get()
        settings = settings_of(hydra_config.launcher)
        if settings.mode != "slurm" and not settings.dry_run:
            return False
        from launch.launching import launch_alone

        launch_alone(self, tuple(task_overrides(hydra_config)), config, settings)
        return True

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
