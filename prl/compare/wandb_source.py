"""Points as wandb knows them: the runs of one group, read through its public API."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic import ValidationError

from prl.compare.curves import ROLES, is_number, make_curves
from prl.compare.hours import from_summary
from prl.compare.points import Point
from prl.compare.wandb_file import WandbRun
from prl.config.errors import UserError
from prl.metrics.reader import Row

STATES = {"finished": "done", "running": "running", "pending": "not started", "preempting": "stopping"}  # others: as is
DEFAULT_PROJECT = "prl"


def connect(target: str) -> Any:
    """A wandb.Api. Raises UserError where wandb does not take the key, or does not answer."""
    with _asking(target):
        import wandb

        return wandb.Api()


@contextmanager
def _asking(target: str) -> Iterator[None]:
    """Around what only wandb's own code does: it raises its own errors, requests', and those of its service process."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"wandb could not be asked for {target}: {(str(error).splitlines() or [''])[0]}",
            where="WANDB_API_KEY, WANDB_BASE_URL",
            why=f"{type(error).__name__}: wandb does not take the key, or cannot be reached from here",
            fix="wandb login; without a network name directories: outputs/sweeps/NAME, or RUN/wandb",
        ) from error


def read_group(target: str, api: Any) -> list[Point]:
    """The points of [[ENTITY/]PROJECT/]GROUP.

    Args:
        api: a wandb.Api.

    Raises UserError if the group has no runs, or wandb refuses.
    """
    path, _, group = target.rpartition("/")
    with _asking(target):
        try:
            runs = [_fetch(run) for run in api.runs(path or DEFAULT_PROJECT, filters={"group": group})]
        except ValueError as error:  # what wandb raises for an unknown project
            raise UserError(f"wandb has no project {path or DEFAULT_PROJECT}", where=target, why=str(error)) from error
    if not runs:
        raise UserError(
            f"wandb has no run in group {group} of project {path or DEFAULT_PROJECT}",
            where=target,
            fix="ENTITY/PROJECT/GROUP, as wandb's page of the group shows it",
        )
    return [read_run(run) for run in runs]


def _fetch(run: Any) -> WandbRun:
    """All of a run of wandb's API, which asks for each part when it is looked at."""
    summary = dict(getattr(run, "summary", {}))
    return WandbRun(run.id, run.name, "", run.state, dict(run.config), summary, list(run.scan_history()))


def read_run(run: WandbRun) -> Point:
    """One run, of wandb's API or files."""
    config = {key: value for key, value in run.config.items() if not key.startswith("_")}
    point_id = str(config.pop("point_id", ""))
    devices = _count_devices(config)
    rows = split_rows(run.history)
    point = Point(
        name=f"{run.name} ({run.id})",
        state=STATES.get(run.state, run.state),
        point_id=point_id,
        job=config.get("job", ""),
        max_steps=config.get("max_steps"),
        devices=devices,
        swept=config.get("swept") or {},
        config=config,
        run_id=run.id,
    )
    point.hours = from_summary(run.summary)
    if any(rows.values()):
        point.curves = make_curves(point.job, rows, devices)
        point.step = point.curves.steps[-1]
    return point


def split_rows(history: Any) -> dict[str, list[Row]]:
    """The rows of each role, from rows whose keys are "role/key" (`prl.metrics.wandb_mirror.chart`)."""
    rows: dict[str, list[Row]] = {role: [] for role in ROLES}
    for row in history:
        step = row.get("step")
        if not is_number(step):
            continue
        for role in ROLES:
            prefix = f"{role}/"
            own = {key.removeprefix(prefix): value for key, value in row.items() if key.startswith(prefix)}
            own = {key: value for key, value in own.items() if value is not None}
            if own:
                rows[role].append({"step": int(step), **own})
    return rows


def _count_devices(config: dict[str, Any]) -> int | None:
    """Devices of trainer and engines, planned anew from the config; None if this version cannot read it."""
    from prl.config.schema import RunConfig
    from prl.planning.planner import make_plan

    try:
        roles = make_plan(RunConfig.model_validate(config)).roles
    except ValidationError:
        return None
    return len({(role.node, device) for role in roles for device in role.devices})
