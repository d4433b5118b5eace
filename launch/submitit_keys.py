"""What was written for hydra-submitit-launcher, as settings of ours.

Beneath are our plans, frozen code and arrays by shape, so points do not block the command that submits them. What a
point takes follows from its plan; a key that says otherwise is refused by name.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from launch.points import Point
from launch.settings import LauncherSettings, gpus_of_lines, read_settings, refuse_lines_of_the_plan
from launch.submitit_nodes import OURS, SubmititLocal, SubmititSlurm
from prl.config.errors import ConfigError, UserError
from prl.config.keys import as_override
from prl.planning.planner import make_plan

if TYPE_CHECKING:
    from prl.config.schema import RunConfig

FOLDER = "/.submitit/%j"  # how their default for logs ends, wherever a sweep lies
MAX_RETRIES = 2  # as in conf/hydra/launcher/auto.yaml; they have no such key
AS_LINES = ("comment", "exclude", "cpus_per_gpu", "mem_per_gpu", "mem_per_cpu")  # sbatch's own options
AS_KEYS = ("partition", "qos", "account", "constraint", "gres", "cpus_per_task", "signal_delay_s", "setup")

THEIRS = {
    "time": "timeout_min",
    "mem": "mem_gb",
    "max_timeouts": "max_num_timeout",
    "job_name": "name",
}  # ours -> theirs
TAKES = {  # where ours takes more than a number
    "timeout_min": "it is a whole number of minutes from 0; 0: no limit",
    "mem_gb": "it is a whole number of GiB from 0; 0: all that a node has",
}


def slurm_settings(node: Mapping[str, Any]) -> LauncherSettings:
    """Of the node submitit_slurm. Raises ConfigError."""
    given = _plain(node)
    lines = [_option(key, given[key]) for key in AS_LINES if given.get(key) is not None]
    more = {str(key): _option(str(key), value) for key, value in given["additional_parameters"].items()}
    refused = [
        told
        for key, line in more.items()
        for told in refuse_lines_of_the_plan([line], f"hydra.launcher.additional_parameters.{key}")
    ]
    lines += more.values()
    slurm = {key: given[key] for key in AS_KEYS if given.get(key) is not None}
    slurm |= {"time": given["timeout_min"], "job_name": given["name"], "max_timeouts": given["max_num_timeout"]}
    slurm["max_retries"] = MAX_RETRIES
    if given["mem_gb"] is not None:
        slurm["mem"] = f"{given['mem_gb']}G"
    own = {"mode": "slurm", "array_parallelism": given["array_parallelism"], "slurm": slurm | {"sbatch": lines}}
    return _read(given, own, refused)


def _read(given: Mapping[str, Any], own: Mapping[str, Any], refused: Iterable[UserError] = ()) -> LauncherSettings:
    """Raises ConfigError with all that is wrong: what is refused already, and what is found here."""
    found = [*_misfits(given), *refused]
    try:
        settings = read_settings({**_shared(given), **own})
    except ConfigError as error:
        of_lines = "hydra.launcher.slurm.sbatch" if refused else None  # told by their own keys
        raise ConfigError(
            found + [_in_their_words(told, given) for told in error.violations if told.where != of_lines]
        ) from error
    if found:
        raise ConfigError(found)
    return settings


def _in_their_words(told: UserError, given: Mapping[str, Any]) -> UserError:
    """What is said of a key of ours, of the key of this launcher that it came from."""
    ours = told.where.removeprefix("hydra.launcher.").removeprefix("slurm.")
    theirs = THEIRS.get(ours, ours)
    if theirs not in SubmititSlurm.__dataclass_fields__:
        return told
    name, usual = f"hydra.launcher.{theirs}", getattr(SubmititSlurm(), theirs)
    return UserError(
        f"{name}={as_override(given[theirs])} is not valid.",
        where=name,
        why=TAKES.get(theirs, told.why) if theirs != ours else told.why,
        fix=f"{name}={as_override(usual)}",
    )


def local_settings(node: Mapping[str, Any]) -> LauncherSettings:
    """Of the node submitit_local, whose memory and cores bind nobody there either. Raises ConfigError."""
    given = _plain(node)
    return _read(given, {"mode": "local", "timeout_min": given["timeout_min"]})


def _plain(node: Mapping[str, Any]) -> dict[str, Any]:
    """With all keys, where somebody's own file for hydra/launcher has some."""
    found = OmegaConf.to_container(OmegaConf.create(dict(node)), resolve=True)
    assert isinstance(found, dict)
    target = str(found.get("_target_"))
    kind = SubmititLocal if OURS.get(target, target).endswith("LocalLauncher") else SubmititSlurm
    usual = {**asdict(kind()), "name": None}  # theirs refers to Hydra's
    return {key: value for key, value in {**usual, **found}.items() if key != "_target_"}


def _misfits(given: Mapping[str, Any]) -> list[UserError]:
    """Of keys that both have: what no point of ours could follow."""
    known = [name for name in SubmititSlurm.__dataclass_fields__ if name != "_target_"]
    found = [
        UserError(
            f"hydra.launcher.{key} is no key of this launcher.",
            where=f"hydra.launcher.{key}",
            why="it has " + ", ".join(known),
            fix=next((f"hydra.launcher.{name}=..." for name in get_close_matches(key, known, 1)), "leave it out"),
        )
        for key in given
        if key not in known
    ]
    if given["tasks_per_node"] != 1:
        found.append(_refusal(given, "tasks_per_node", "one agent of prl starts all processes of a node", "1"))
    if given.get("gpus_per_task") is not None:
        why = "a node has one task, and its GPUs follow from the point's plan"
        found.append(_refusal(given, "gpus_per_task", why, "null"))
    if not str(given["submitit_folder"]).endswith(FOLDER):
        why = "scripts and logs lie in the sweep's own directory, in slurm/"
        found.append(_refusal(given, "submitit_folder", why, "", "leave it out; hydra.sweep.dir=... moves the sweep"))
    return found


def _shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """What both have."""
    asked = {key: given[key] for key, usual in (("nodes", 1), ("gpus_per_node", None)) if given[key] != usual}
    return {"dry_run": given["dry_run"], "retry_failed": given["retry_failed"], "asked": asked}


def _refusal(given: Mapping[str, Any], key: str, why: str, right: str, fix: str = "") -> UserError:
    name = f"hydra.launcher.{key}"
    return UserError(f"{name}={given[key]} cannot be.", where=name, why=why, fix=fix or f"{name}={right}")


def _option(key: str, value: Any) -> str:
    """A line of `additional_parameters`, as submitit writes it."""
    flag = f"--{key.replace('_', '-')}"
    return flag if value is True else f"{flag}={shlex.quote(str(value))}"


def refuse_asked(node: Mapping[str, Any], config: RunConfig) -> None:
    """As `refuse_contradictions`, of the node hydra.launcher, whatever else is wrong with it."""
    target = str(node.get("_target_"))
    if OURS.get(target, target).endswith(tuple(OURS.values())):
        asked = LauncherSettings(asked=_shared(_plain(node))["asked"])
        placed = config.model_copy(update={"output_dir": config.output_dir or "this plan"})
        refuse_contradictions([Point((), make_plan(placed))], asked)


def refuse_contradictions(points: Iterable[Point], settings: LauncherSettings) -> None:
    """Raise ConfigError for points whose plan takes other nodes or GPUs than the launcher was told to ask for, or
    whose own lines of sbatch do.
    """
    found: dict[str, UserError] = {}
    for point in points:
        for told in refuse_lines_of_the_plan(point.config.slurm.sbatch or (), "slurm.sbatch"):
            found[told.what] = told
        on_cpu = point.config.deployment.device == "cpu"
        takes = {"nodes": point.plan.num_nodes, "gpus_per_node": 0 if on_cpu else point.plan.gpus_per_node}
        lines = [*(settings.slurm.sbatch or ()), *(point.config.slurm.sbatch or ())]
        gres = point.config.slurm.gres or settings.slurm.gres
        lines += [f"--gres={gres}"] if gres else []
        for line, given in gpus_of_lines(lines, point.plan.num_nodes):
            if given < takes["gpus_per_node"]:
                found[line] = UserError(
                    f"{line} asks for too few GPUs for {point.path.name}.",
                    where="slurm.gres, slurm.sbatch, or additional_parameters of submitit's launcher",
                    why=f"its plan takes {takes['gpus_per_node']} on a node: deployment and parallelism say so",
                    fix=f"leave it out, or ask for {takes['gpus_per_node']}",
                )
        for key, wanted in settings.asked.items():
            if wanted != takes[key]:
                found[key] = UserError(
                    f"hydra.launcher.{key}={wanted} contradicts {point.path.name}.",
                    where=f"hydra.launcher.{key}",
                    why=f"its plan takes {takes[key]}: deployment and parallelism say what a point takes",
                    fix=f"leave it out, or hydra.launcher.{key}={takes[key]}",
                )
    if found:
        raise ConfigError(list(found.values()))
