"""What jobs ask of SLURM: a shape of resources for each point, batches of one shape, and what cannot be asked for."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from launch.points import Point
from launch.settings import LauncherSettings
from prl.config.errors import ConfigError, UserError
from prl.config.loopback import on_loopback
from prl.config.rules.external import asked_servers
from prl.config.schema import SlurmConfig


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
    near = {url: None for point in points for urls in asked_servers(point.plan.config) for url in on_loopback(urls)}
    if near:
        raise ConfigError(
            [
                UserError(
                    f"A job on a node does not reach {url}.",
                    where="inference.urls, algo.teacher.urls, hydra/launcher=slurm",
                    why="on the node, loopback is the node itself",
                    fix="the address of the server's host (it is started with inference.host=0.0.0.0, or --host), or "
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
