"""One call of an entry point: its job, the points of its multirun, and how they ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from prl.config.console import one_line
from prl.config.hydra_setup import in_hydras_terms
from prl.config.overrides import name_of_axis
from prl.config.sweep import resolve_points
from prl.runtime.directory.status_file import read_status

if TYPE_CHECKING:  # the schema is pydantic's: --cfg and completion do without it
    from prl.config.schema import RunConfig

Job = Callable[["RunConfig"], int]
LEFT = {  # state of a point -> why it is not started
    "done": "done already",
    "active": "running or queued already",
    "failed": "failed before, and would again; hydra.launcher.retry_failed=true tries",
}


@dataclass
class Session:
    """What an entry point hands over. `job` is called for a run here and now; what a launcher starts, it starts from
    the points' plans.
    """

    job: Job
    config_name: str = "rl"
    starts_nothing: bool = False  # the job only looks at its config
    swept: set[str] = field(default_factory=set)  # keys as typed
    points: dict[tuple[str, ...], RunConfig] = field(default_factory=dict)  # overrides -> point, of a multirun
    exit_code: int = 0
    error: Exception | None = None
    failed: dict[str, int] = field(default_factory=dict)  # point directory -> exit code

    def configs_of(self, batch: Sequence[tuple[str, ...]], sweep_dir: Path) -> list[RunConfig]:
        """The points of these overrides, each with its directory. Raises ConfigError for what was not composed before
        (by a sweeper that makes up its points) and is wrong, and for points that lack what they are to begin with.
        """
        from prl.config.branching import check_start  # pydantic: completion does without it

        new = [list(lines) for lines in batch if point_key(lines) not in self.points]
        self.points |= zip(map(point_key, new), resolve_points(new, self.config_name, self.swept), strict=True)
        placed = [self._placed(self.points[point_key(lines)], lines, sweep_dir) for lines in batch]
        for config in placed:
            check_start(config)
        return placed

    def _placed(self, config: RunConfig, overrides: tuple[str, ...], sweep_dir: Path) -> RunConfig:
        from prl.config.point import point_label  # pydantic, as above

        pairs = [line.partition("=")[::2] for line in overrides]
        swept = {name_of_axis(key): value for key, value in pairs if key in self.swept}
        config = config.model_copy(update={"sweep": sweep_dir.name, "swept": swept})
        return config.model_copy(update={"output_dir": str(sweep_dir / point_label(config))})

    def leave(self, path: Path, state: str, changed: Sequence[str] = ()) -> None:
        """Say why a point is not started; one that has failed counts as failed for this sweep, too.

        Args:
            state: one of `LEFT`.
            changed: names of what it read that is another by now.
        """
        since = f"; since then changed: {', '.join(changed)}" if changed else ""
        print(one_line(f"{path.name}: {LEFT[state]}{since}"), file=sys.stderr, flush=True)
        if state == "failed":
            self.failed[str(path)] = 1

    def try_again(self, path: Path) -> None:
        """Say that a point is started although it was refused before, and why it was."""
        message = (read_status(path).get("failure") or {}).get("message", "")
        print(one_line(f"{path.name}: refused before, tried again: {message}"), file=sys.stderr, flush=True)


def point_key(overrides: Iterable[str]) -> tuple[str, ...]:
    """What tells points apart: Hydra gives its launchers the overrides without its own."""
    lines = in_hydras_terms(list(overrides))
    return tuple(sorted(line for line in lines if not line.startswith(("hydra.", "hydra/"))))
