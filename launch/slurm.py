"""Points as SLURM arrays: one array for each shape of resources, cut where the cluster's arrays end."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import submitit

from launch.code_copy import FrozenCode, freeze_code
from launch.points import Point, record_submission
from launch.settings import LauncherSettings
from launch.slurm_queue import max_array_size, run_slurm
from prl.config.errors import ConfigError, UserError
from prl.config.rules.external import on_loopback
from prl.config.schema import SlurmConfig
from prl.runtime.directory.files import create_exclusively, replace_file
from prl.runtime.nodes.job_nodes import without_job
from prl.runtime.process.python_path import python_command

DEFAULT_TEMPLATE = Path(__file__).parent / "templates" / "default.sbatch.j2"


@dataclass(frozen=True)
class Shape:
    """What a job asks for. Points of one shape go into one array."""

    job: str
    nodes: int
    infer_nodes: int
    gpus_per_node: int
    slurm: SlurmConfig

    @classmethod
    def of(cls, point: Point, settings: LauncherSettings) -> Shape:
        plan = point.plan
        own = point.config.slurm.model_dump(exclude_none=True)
        gpus = 0 if point.config.deployment.device == "cpu" else plan.gpus_per_node
        # of a run on one node, that node counts as a training node
        infer = len({role.node for role in plan.roles_of("inference")}) if plan.num_nodes > 1 else 0
        return cls(point.config.job, plan.num_nodes, infer, gpus, settings.slurm.model_copy(update=own))

    def describe(self) -> str:
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} x {self.gpus_per_node} GPUs"


@dataclass(frozen=True)
class Batch:
    """One job to submit: an array, or a single job for one point."""

    shape: Shape
    points: list[Point]
    parallelism: int | None

    @property
    def is_array(self) -> bool:
        return len(self.points) > 1

    @property
    def array(self) -> str | None:
        """As sbatch reads it."""
        if not self.is_array:
            return None
        return f"0-{len(self.points) - 1}" + (f"%{self.parallelism}" if self.parallelism else "")


def refuse_loopback_engines(points: list[Point]) -> None:
    """Engines that run already, and that only this machine reaches. Raises ConfigError."""
    near = {url: None for point in points for url in on_loopback(point.plan.config.inference.urls)}
    if near:
        raise ConfigError(
            [
                UserError(
                    f"A job on a node does not reach {url}.",
                    where="inference.urls, hydra/launcher=slurm",
                    why="on the node, loopback is the node itself",
                    fix="the address of the engine's host (it is started with inference.host=0.0.0.0), or "
                    "hydra/launcher=local",
                )
                for url in near
            ]
        )


def refuse_too_large(points: list[Point]) -> None:
    """Raise ConfigError with every point that wants more GPUs of a node than a node has."""
    found = [
        UserError(
            f"{point.path.name} does not fit on a node.",
            where=f"deployment.gpus_per_node={point.config.deployment.gpus_per_node}",
            why=f"its roles take {point.plan.gpus_per_node} devices of one node",
            fix="deployment=disaggregated takes further nodes; or less parallelism, or more deployment.gpus_per_node",
        )
        for point in points
        if point.config.deployment.device != "cpu" and point.plan.gpus_per_node > point.config.deployment.gpus_per_node
    ]
    if found:
        raise ConfigError(found)


def refuse_too_short(points: list[Point], settings: LauncherSettings) -> None:
    """Raise ConfigError where jobs would be told of their end before they begin."""
    shapes = {Shape.of(point, settings).slurm for point in points}
    found = [
        UserError(
            "Jobs would be told to save before they begin.",
            where=f"slurm.signal_delay_s={asked.signal_delay_s}",
            why=f"slurm.time={asked.time} is {limit:g} s",
            fix=f"slurm.signal_delay_s={int(limit / 4)}, or more slurm.time",
        )
        for asked in shapes
        if asked.signal_delay_s is not None
        if (limit := seconds_of(asked.time)) <= asked.signal_delay_s
    ]
    if found:
        raise ConfigError(found)


def seconds_of(limit: str | int | None) -> float:
    """Of a time limit as sbatch reads it: M, M:S, H:M:S, D-H, D-H:M, D-H:M:S, in whole minutes, rounded up; infinite
    where it says none, or 0, which asks for no limit.
    """
    if limit is None or not re.fullmatch(r"[\d:-]+", str(limit)):
        return math.inf
    days, dash, rest = str(limit).rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if not dash and len(parts) < 3:  # it begins with minutes
        parts = [0, *parts]
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    whole = int(days or 0) * 1440 + hours * 60 + minutes + math.ceil(seconds / 60)
    return whole * 60.0 or math.inf


def make_batches(points: list[Point], settings: LauncherSettings, max_size: int) -> list[Batch]:
    by_shape: dict[Shape, list[Point]] = {}
    for point in points:
        by_shape.setdefault(Shape.of(point, settings), []).append(point)
    return [
        Batch(shape, members[start : start + max_size], settings.array_parallelism)
        for shape, members in by_shape.items()
        for start in range(0, len(members), max_size)
    ]


class PointExecutor(submitit.SlurmExecutor):
    """submitit's submission of a script, with a script of ours: it starts agents and needs no pickles."""

    def __init__(self, folder: Path, script: str) -> None:
        super().__init__(folder)
        self.script = script

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return self.script

    def submit_script(self) -> str:
        """Submit. Returns the job's id. Raises UserError with sbatch's reason."""
        try:
            with _outside_of_jobs():
                return self._submit_command("").job_id
        except submitit.core.utils.FailedJobError as error:
            reason = re.findall(r"sbatch: error: (.*)", str(error)) or [str(error).strip().splitlines()[-1]]
            raise UserError(
                f"sbatch refused the job: {reason[-1]}",
                where="hydra.launcher.slurm",
                why="; ".join(reason[:-1]),
                fix="hydra.launcher.dry_run=true shows the script; sinfo and sacctmgr show what this cluster allows",
            ) from error


@contextlib.contextmanager
def _outside_of_jobs() -> Iterator[None]:
    """Jobs inherit what sbatch does not set anew: the array index of the job that this command may run in."""
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(without_job(before))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def submit(points: list[Point], sweep_dir: Path, settings: LauncherSettings) -> list[str]:
    """Submit all and return at once. Returns the ids of the jobs, one for each array."""
    if not points:
        return []
    folder = sweep_dir / "slurm"
    folder.mkdir(parents=True, exist_ok=True)
    code = freeze_code(sweep_dir, points)
    jobs = []
    for batch in make_batches(points, settings, settings.max_array_size or max_array_size()):
        script = write_script(batch, sweep_dir, code)
        job_id = PointExecutor(folder, script.read_text()).submit_script()
        try:
            record_submission(sweep_dir, job_id, script, batch.points, batch.is_array, code)
        except (OSError, UserError):
            _take_back(job_id)
            raise
        jobs.append(job_id)
        what = f"array of {len(batch.points)} points" if batch.is_array else batch.points[0].path.name
        print(f"job {job_id}: {what}, {batch.shape.describe()}, {script}", flush=True)
    print(f"python -m prl.status {os.path.relpath(sweep_dir)} shows what becomes of them", flush=True)
    return jobs


def _take_back(job_id: str) -> None:
    """A job that no record names: prl.cancel would not know it, and the same command would submit its points again."""
    with contextlib.suppress(UserError):
        run_slurm("scancel", job_id)
    print(f"job {job_id} was cancelled: it could not be recorded", file=sys.stderr, flush=True)


def write_script(batch: Batch, sweep_dir: Path, code: FrozenCode) -> Path:
    """SWEEP/slurm/N.sbatch, and the list of its points beside it."""
    folder = sweep_dir / "slurm"
    lines = "".join(f"{point.path}\n" for point in batch.points)
    # the number belongs to who makes the list: jobs read it when they start
    number = next(i for i in range(1, 1_000_000) if create_exclusively(folder / f"{i}.points", lines))
    script, listing = folder / f"{number}.sbatch", folder / f"{number}.points"
    replace_file(script, render(batch, sweep_dir, code, listing))
    return script


def render(batch: Batch, sweep_dir: Path, code: FrozenCode, listing: Path) -> str:
    """The sbatch script. Raises UserError for a template that is not there or cannot be rendered."""
    path = Path(batch.shape.slurm.template_path or DEFAULT_TEMPLATE).expanduser()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["quote"] = shlex.quote
    try:
        text = path.read_text()
        return environment.from_string(text).render(template_variables(batch, sweep_dir, code, listing))
    except (OSError, jinja2.TemplateError) as error:
        raise UserError(
            f"The sbatch template cannot be used: {error}",
            where=f"slurm.template_path={path}",
            why=f"line {getattr(error, 'lineno', '?')}" if isinstance(error, jinja2.TemplateSyntaxError) else "",
            fix=f"start from a copy of {DEFAULT_TEMPLATE}; launch/README.md lists the variables",
        ) from error


def template_variables(batch: Batch, sweep_dir: Path, code: FrozenCode, listing: Path) -> dict[str, Any]:
    """What a template may use; launch/README.md explains each."""
    shape = batch.shape
    return {
        "job_name": shape.slurm.job_name or f"prl-{sweep_dir.name}",
        "project_dir": str(Path.cwd()),
        "output_dir": str(sweep_dir),
        "config_dir": str(listing.parent),
        "num_train_nodes": shape.nodes - shape.infer_nodes,
        "num_infer_nodes": shape.infer_nodes,
        "nodes": shape.nodes,
        "gpus_per_node": shape.gpus_per_node,
        "hf_hub_offline": os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"),
        "array": batch.array,
        "gres": shape.slurm.gres or (f"gpu:{shape.gpus_per_node}" if shape.gpus_per_node else None),
        "log": str(listing.parent / ("%A_%a.log" if batch.is_array else "%j.log")),
        "python_path": code.python_path,
        "command": shlex.join(python_command("prl.runtime.agent", "--list", str(listing))),
        "slurm": shape.slurm,
    }
