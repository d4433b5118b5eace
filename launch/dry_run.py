"""hydra.launcher.dry_run=true: everything that would be started, written and printed; nothing starts."""

from __future__ import annotations

from pathlib import Path

from launch.code_copy import freeze_code
from launch.points import Point, PointState, freeze, record_points
from launch.settings import LauncherSettings
from launch.slurm import make_batches, write_script
from launch.slurm_queue import DEFAULT_MAX_ARRAY_SIZE
from prl.planning.render import render_plan


def show(
    points: list[Point],
    states: dict[Path, PointState],
    todo: list[Point],
    sweep_dir: Path,
    settings: LauncherSettings,
    on_slurm: bool,
) -> None:
    """Freeze the points, print the layout of each and, for SLURM, write and print the scripts."""
    record_points(sweep_dir, points)
    for point in points:
        print(f"== {point.path.name} ({states[point.path]})")
        print(render_plan(point.plan))
        if point in todo:
            freeze(point)
            print(f"by hand: python -m prl.runtime.agent {point.path}")
    if not on_slurm or not todo:
        return
    (sweep_dir / "slurm").mkdir(parents=True, exist_ok=True)
    code = freeze_code(sweep_dir)
    for batch in make_batches(todo, settings, settings.max_array_size or DEFAULT_MAX_ARRAY_SIZE):
        script = write_script(batch, sweep_dir, code)
        print(f"== {script}")
        print(script.read_text())
