"""What a launcher choice (conf/hydra/launcher) says: how points are queued, and what is asked of SLURM for each."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from prl.config.errors import ConfigError, UserError
from prl.config.keys import as_override
from prl.config.locate import conf_dir
from prl.config.schema import SlurmConfig
from prl.config.schema_fields import IN_WORDS, SlurmMemory, SlurmTime


class LauncherSettings(BaseModel):
    """The node hydra.launcher. What it says of jobs can be overridden for a point by the keys of the node `slurm`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "local", "slurm"] = "auto"  # auto: slurm on machines of a cluster
    dry_run: bool = False  # write and print everything, start nothing
    retry_failed: bool = False  # points whose failure would come again (oom, config, env, diverged, code), too
    parallel_points: Annotated[int, Field(ge=1)] | Literal["auto"] = (
        "auto"  # local: at a time; auto: as many as the GPUs hold, without GPUs 1
    )
    array_parallelism: int | None = Field(default=None, ge=1)  # slurm: elements of an array at a time, None: all
    max_array_size: int | None = Field(default=None, ge=1)  # None: the cluster's
    timeout_min: Annotated[float, Field(gt=0)] | None = None  # local: a point that takes longer saves and ends
    asked: dict[str, int] = {}  # nodes, gpus_per_node: what a launcher of submitit's was told that each point takes
    slurm: SlurmConfig = SlurmConfig()


# as a line begins, or as a further option of it; one task on each node is what there is
OF_THE_PLAN = re.compile(
    r"(?:^|\s)(--(?:nodes|ntasks(?!-per-node[= ]+1\s*$)(?:-per-[a-z]+)?|array|output|error))(?=[=\s]|$)"
    r"|^\s*(-[Nnaoe])"
)
# what has a key of its own, by which the script and the run go: ours, and that of submitit's launcher
OWN_KEYS = {
    "--time": ("slurm.time", "timeout_min"),
    "--signal": ("slurm.signal_delay_s", "signal_delay_s"),
    "--job-name": ("slurm.job_name", "name"),
    "--no-requeue": ("slurm.max_retries=0 slurm.max_timeouts", "max_num_timeout"),
}
OF_A_KEY = re.compile(rf"(?:^|\s)({'|'.join(OWN_KEYS)})(?=[=\s]|$)")
SUBMITITS = "hydra.launcher.additional_parameters."
GPUS = re.compile(r"(?:^|\s)--(gres|gpus|gpus-per-node|gpus-per-task)[= ]+(\S+)")
TAKES = {  # where a union of types complains of its last one alone
    "parallel_points": "it is a whole number from 1, or auto",
    "slurm.time": IN_WORDS[SlurmTime],
    "slurm.mem": IN_WORDS[SlurmMemory],
}


def read_settings(node: Mapping[str, Any]) -> LauncherSettings:
    """Of the node hydra.launcher, without its _target_. Raises ConfigError for values that are none."""
    plain = OmegaConf.to_container(OmegaConf.create(dict(node)), resolve=True)
    try:
        settings = LauncherSettings.model_validate(plain)
    except ValidationError as error:
        items = {item["loc"][: 1 + (item["loc"][0] == "slurm")]: dict(item) for item in error.errors()}
        raise ConfigError([_invalid(".".join(map(str, key)), item) for key, item in items.items()]) from error
    of_the_plan = refuse_lines_of_the_plan(settings.slurm.sbatch or (), "hydra.launcher.slurm.sbatch")
    if found := [*_misplaced(settings), *of_the_plan]:
        raise ConfigError(found)
    return settings


def refuse_lines_of_the_plan(lines: Iterable[str], where: str) -> Iterator[UserError]:
    """Lines of sbatch for what follows from a point's plan, or from where its sweep lies.

    Args:
        where: the key that has the lines.
    """
    for line in lines:
        if (own := OF_A_KEY.search(line)) is not None:
            of_submitit = where.startswith(SUBMITITS)
            key = f"hydra.launcher.{OWN_KEYS[own[1]][1]}" if of_submitit else OWN_KEYS[own[1]][0]
            yield UserError(
                f"{where} has {line!r}, which has a key of its own.",
                where=where,
                why="the script would say it twice, and the run goes by the key",
                fix=f"leave {own[1]} out; {key}={'0' if own[1] == '--no-requeue' else 'VALUE'}",
            )
        met = OF_THE_PLAN.search(line)
        if met is not None:
            yield UserError(
                f"{where} has {line!r}, which cannot be.",
                where=where,
                why="nodes, tasks and the array follow from the plans of the points; logs lie in the sweep's slurm/",
                fix=f"leave {met[1] or met[2]} out; deployment and parallelism say what a point takes",
            )


def gpus_of_lines(lines: Iterable[str], nodes: int) -> Iterator[tuple[str, int]]:
    """Of lines of sbatch that ask for GPUs: the line, and how many a node gets by it."""
    for line in lines:
        for option, value in GPUS.findall(line):
            entries = [entry.strip("'\"") for entry in value.split(",")]
            if option == "gres":
                entries = [entry[4:] for entry in entries if entry == "gpu" or entry.startswith("gpu:")]
            counts = [int(last) if (last := entry.rpartition(":")[2]).isdecimal() else 1 for entry in entries]
            if counts:
                yield line, sum(counts) // (nodes if option == "gpus" else 1)


def _invalid(name: str, item: dict[str, Any]) -> UserError:
    key, given = f"hydra.launcher.{name}", item["input"]
    why = TAKES.get(name) or str(item["msg"]).replace("Input should be ", "it must be ")
    fix = f"{key}={as_override(_usual(name))}"
    if item["type"] == "tuple_type":
        why = "it is a list"
        fix = f"{key}=[{given}]" if re.fullmatch(r"[\w./-]+", str(given)) else fix
    elif name == "slurm":
        why, fix = f"it holds keys: {', '.join(SlurmConfig.model_fields)}", "hydra.launcher.slurm.time=2:00:00"
    elif item["type"] == "extra_forbidden":
        why, fix = "this launcher has no such key", "leave it out; python -m prl.rl --cfg hydra shows hydra.launcher"
    return UserError(f"{key}={as_override(given)} is not valid.", where=key, why=why, fix=fix)


def _usual(name: str) -> Any:
    """What conf/hydra/launcher has."""
    return OmegaConf.select(OmegaConf.load(conf_dir() / "hydra/launcher/auto.yaml"), name)


def _misplaced(settings: LauncherSettings) -> Iterator[UserError]:
    """Keys of points on this machine for SLURM, and the other way round, which nobody would read."""
    if settings.mode == "slurm":
        there = "jobs of SLURM"
        minutes = "slurm.time=0" if settings.timeout_min is None else f"slurm.time={math.ceil(settings.timeout_min)}"
        wrong = {
            "timeout_min": (settings.timeout_min, None, minutes),
            "parallel_points": (
                settings.parallel_points,
                "auto",
                f"array_parallelism={settings.parallel_points}",
            ),
        }
    elif settings.mode == "local":
        there = "points on this machine"
        wrong = {
            "array_parallelism": (
                settings.array_parallelism,
                None,
                f"parallel_points={settings.array_parallelism}",
            ),
            "max_array_size": (settings.max_array_size, None, "max_array_size=null"),
        }
    else:
        return
    for name, (value, unset, fix) in wrong.items():
        if value != unset:
            yield UserError(
                f"hydra.launcher.{name}={as_override(value)} says nothing of {there}.",
                where=f"hydra.launcher.{name}",
                why=f"hydra.launcher.mode is {settings.mode}",
                fix=f"hydra.launcher.{fix}",
            )
