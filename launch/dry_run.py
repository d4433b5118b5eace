"""hydra.launcher.dry_run=true: everything that would be started, written and printed; nothing starts."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from launch.code_copy import freeze_code
from launch.points import Point, freeze
from launch.roles import COMMANDS, ROLES, to_yaml, write_roles
from launch.settings import LauncherSettings
from launch.shapes import make_batches
from launch.slurm import write_script
from launch.slurm_queue import DEFAULT_MAX_ARRAY_SIZE
from launch.states import PointState
from launch.sweep_file import record_points
from prl.config.console import one_line
from prl.planning.render import render_plan

INDENT = "    "


def show(
    points: list[Point],
    states: dict[Path, PointState],
    todo: list[Point],
    sweep_dir: Path,
    settings: LauncherSettings,
    on_slurm: bool,
) -> None:
    """Freeze the points; print the layout of each, the configuration of its roles and, for SLURM, the scripts."""
    record_points(sweep_dir, points)
    first: dict[str, dict[str, Any]] = {}
    for point in points:
        print(one_line(f"== {point.path.name} ({states[point.path]})"))
        print(render_plan(point.plan))
        if point in todo:
            freeze(point)
            configs = write_roles(point)
            print(one_line(f"commands: {point.path / ROLES / COMMANDS}"))
            print_roles(point, configs, first)
            first = first or configs
            print(one_line(f"by hand: python -m prl.runtime.agent {shlex.quote(str(point.path))}"))
    if not on_slurm or not todo:
        return
    (sweep_dir / "slurm").mkdir(parents=True, exist_ok=True)
    code = freeze_code(sweep_dir, todo)
    for batch in make_batches(todo, settings, settings.max_array_size or DEFAULT_MAX_ARRAY_SIZE):
        script = write_script(batch, sweep_dir, code)
        print(one_line(f"== {script}"))
        print(script.read_text())


def print_roles(point: Point, configs: dict[str, dict[str, Any]], first: dict[str, dict[str, Any]]) -> None:
    """The configuration of each role; once the first point is told, only what differs from it."""
    for role, config in configs.items():
        print(one_line(f"{role}: {point.path / ROLES / role}.yaml"))
        lines = to_yaml(config).splitlines()
        if role in first:
            lines = [f"{key}: {json.dumps(value)}" for key, value in differences(config, first[role]).items()]
        print("".join(f"{INDENT}{line}\n" for line in lines), end="")


def differences(config: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys of `config` whose values `base` does not have, and null for those that only `base` has."""
    mine, theirs = flatten(config), flatten(base)
    changed = {key: value for key, value in mine.items() if key not in theirs or theirs[key] != value}
    return changed | {key: None for key in theirs if key not in mine}


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {f"{prefix}{key}": value}
    return flat
