"""The run directory: made or taken over exclusively, locked while its run lives, and never shared by two points."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import secrets
import shutil
import sys
import time
from dataclasses import dataclass
from importlib import metadata
from itertools import count
from pathlib import Path
from typing import Any

from prl.config.errors import UserError
from prl.config.point import NOT_IDENTITY
from prl.config.search_path import directories
from prl.planning.run_plan import RunPlan, plan_to_json
from prl.runtime.directory.files import (
    PARTIAL,
    full_disk_here,
    is_full_disk,
    is_held,
    parse_object,
    read_object,
    replace_file,
)
from prl.runtime.directory.identity import describe_process, find_process
from prl.runtime.directory.inputs import describe_inputs

OUTPUTS = Path("outputs")
LOCK = ".lock"
ENV = "env.json"
# left by a run that was killed while freezing, and what a submission of it alone writes before
BEFORE_PLAN = {LOCK, "overrides.txt", ENV, "sweep.json", ".sweep.json.lock", ".submit.lock", "slurm", "code"}
MOST_TOLD = 3  # keys in which another point differs
LOCK_BYTES = 1000
LOCK_WAIT_S = 10.0  # for the reaper of a killed run to end its last processes
PACKAGES = ("torch", "numpy", "transformers", "hydra-core", "pydantic", "aiohttp", "wandb", "vllm")


@dataclass
class RunDir:
    """A claimed directory. `made`: it and those above it that were not there before, itself first; a run that is
    refused at its start leaves none of them behind.
    """

    path: Path
    lock_fd: int
    made: tuple[Path, ...]
    fresh: bool  # no earlier attempt of this point
    run_id: str = ""  # of this directory: point id and a random part; stays the same when the run resumes

    def release(self) -> None:
        os.close(self.lock_fd)

    def is_ours(self) -> bool:
        """Whether the lock that we hold is the one that lies there. Told by its content: not every filesystem keeps
        the numbers of files. What cannot be looked at now (ESTALE, EIO) may be ours, and a lock alone may fall to who
        tidies up.
        """
        try:
            return (self.path / LOCK).read_bytes() == os.pread(self.lock_fd, LOCK_BYTES, 0)
        except (FileNotFoundError, NotADirectoryError):
            return (self.path / "plan.json").exists()
        except OSError:
            return True

    def discard(self) -> None:
        """Remove what a run that never began has left: the directory, or its contents if it was there before."""
        if not self.is_ours():
            return
        for path in list(self.path.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # not empty: somebody else's files
            for path in self.made:
                path.rmdir()


def claim(plan: RunPlan) -> RunDir:
    """Take the run directory of a plan and freeze the plan in it.

    `output_dir` unset: a new directory under outputs/. Set: fresh if empty or absent, resumed if of the same point.
    Raises UserError if it belongs to something else, or if its run is alive.
    """
    wanted = plan.config.output_dir
    if wanted is None:
        above = _absent(OUTPUTS.absolute())
        path = make_unique(plan.config.name)
        made = (path, *above)
    else:
        path = Path(wanted).expanduser().absolute()
        made = _absent(path)
        refuse_foreign(path, plan)
        _make(path)
    lock_fd = _lock(path)
    fresh = not (path / "plan.json").exists()
    run_dir = RunDir(path, lock_fd, made, fresh)
    try:
        if fresh:
            _freeze(path, plan)
        elif _point_of_plan(path) is None:  # damaged, and env.json says that it is this point's
            replace_file(path / "plan.json", plan_to_json(plan))
    except OSError as error:
        if fresh:
            run_dir.discard()
        run_dir.release()
        raise _not_writable(path, error) from error
    run_dir.run_id = (read_object(path / ENV) or {}).get("run_id") or _new_run_id(plan)
    return run_dir


def _absent(path: Path) -> tuple[Path, ...]:
    """Of a directory and those above it the ones that are not there, itself first."""
    return tuple(folder for folder in (path, *path.parents) if not os.path.exists(folder))


def refuse_foreign(path: Path, plan: RunPlan) -> None:
    """UserError unless the directory is absent, empty, or of the same point."""
    if not os.path.exists(path):
        return
    if not path.is_dir():
        raise UserError(f"{path} is not a directory", where="output_dir", fix="name another directory")
    names = {entry.name for entry in path.iterdir() if not _is_unfinished(entry.name)} - BEFORE_PLAN
    if not names:
        return
    other = "output_dir=ANOTHER_DIRECTORY, or leave output_dir out for a fresh one"
    if "plan.json" not in names:
        if {"status.json", "checkpoints"} <= names:
            raise UserError(
                f"{path} holds a run without its plan.json",
                where="output_dir",
                why="plan.json says which point the run is of, and without it nothing can go on with it",
                fix=f"bring it back from a copy, or {other}; its checkpoints are in {path / 'checkpoints'}",
            )
        raise UserError(
            f"{path} is not empty and holds no run",
            where="output_dir",
            why="a run writes only into a directory that is its own",
            fix=other,
        )
    found = read_point_id(path)
    if found != plan.point_id:
        raise UserError(
            f"{path} belongs to a different run",
            where="output_dir",
            why=f"only the same point resumes, and {what_differs(path, plan)}",
            fix=other,
        )


def what_differs(path: Path, plan: RunPlan) -> str:
    """Between what a directory was made for and a configuration, key by key."""
    was = _flat((read_object(path / "plan.json") or {}).get("config"))
    now = _flat(plan.config.model_dump(mode="json"))
    keys = [key for key in now if key.split(".")[0] not in NOT_IDENTITY and key in was and was[key] != now[key]]
    keys += [key for key in was if key not in now] + [key for key in now if key not in was]
    if not was or not keys:
        return f"its point is {read_point_id(path)}, this configuration is {plan.point_id}"
    told = [f"{key} was {was.get(key, 'not there')}, and is {now.get(key, 'not there')}" for key in keys[:MOST_TOLD]]
    return "; ".join(told) + f"; and {len(keys) - MOST_TOLD} more keys" * (len(keys) > MOST_TOLD)


def _flat(node: Any, name: str = "") -> dict[str, str]:
    """Dotted keys of an object of JSON, and their values in words."""
    if not isinstance(node, dict) or not node:
        return {name: json.dumps(node)} if name else {}
    return {
        key: value
        for inner, below in node.items()
        for key, value in _flat(below, f"{name}.{inner}" if name else str(inner)).items()
    }


def _is_unfinished(name: str) -> bool:
    """Whether `replace_file` was killed while it wrote one of the files before plan.json."""
    return name.endswith(PARTIAL) and name.startswith(tuple(f".{whole}." for whole in (*BEFORE_PLAN, "plan.json")))


def read_point_id(path: Path) -> str:
    """The point id in plan.json, or in env.json if that is damaged; "unreadable" if both are."""
    from_env = str((read_object(path / ENV) or {}).get("run_id", "")).rpartition("-")[0]
    return _point_of_plan(path) or from_env or "unreadable"


def _point_of_plan(path: Path) -> str | None:
    point_id = (read_object(path / "plan.json") or {}).get("point_id")
    return point_id if isinstance(point_id, str) else None


def is_locked(path: Path) -> bool:
    """Whether a run lives in this directory."""
    return is_held(path / LOCK)


def make_unique(name: str) -> Path:
    """outputs/<name>-<YYYYmmdd-HHMMSS>[-n]; mkdir decides between runs that start in the same second."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in count(1):
        path = (OUTPUTS / f"{name}-{stamp}{f'-{number}' if number > 1 else ''}").absolute()
        try:
            _make(path, exist_ok=False)
        except FileExistsError:
            continue
        return path
    raise AssertionError("unreachable")


def _make(path: Path, exist_ok: bool = True) -> None:
    try:
        path.mkdir(parents=True, exist_ok=exist_ok)
    except FileExistsError:
        raise
    except OSError as error:
        raise _not_writable(path, error) from error


def _not_writable(path: Path, error: OSError) -> UserError:
    if is_full_disk(error):
        return full_disk_here(error, path)
    return UserError(
        f"the run directory {path} cannot be made: {error.strerror or error}",
        where="output_dir",
        fix="output_dir=A_WRITABLE_DIRECTORY",
    )


def refuse_alive(path: Path) -> None:
    """Raise UserError if a run is alive in this directory; waits for the last processes of one that was killed."""
    os.close(_lock(path))


def _lock(path: Path) -> int:
    """An exclusive lock, held by this descriptor and those who inherit it. Raises UserError if a run is alive here."""
    try:
        fd = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise _not_writable(path, error) from error
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            holder = parse_object(os.pread(fd, LOCK_BYTES, 0)) or {}
            if find_process(holder) == "alive" or time.monotonic() > deadline:
                os.close(fd)
                raise UserError(
                    f"a run is alive in {path} (process {holder.get('pid')} on {holder.get('host')})",
                    where="output_dir",
                    why="two runs never share a directory",
                    fix="stop it first, or name another output_dir",
                ) from None
            time.sleep(0.05)
    with contextlib.suppress(OSError):  # a full disk: the lock holds without
        os.truncate(fd, 0)
        os.pwrite(fd, json.dumps(describe_process()).encode(), 0)
    return fd


def _freeze(path: Path, plan: RunPlan) -> None:
    """plan.json last: it is what makes the directory a run's."""
    replace_file(path / "overrides.txt", "".join(f"{line}\n" for line in _overrides()))
    replace_file(path / ENV, json.dumps(_environment(plan), indent=1) + "\n")
    replace_file(path / "plan.json", plan_to_json(plan))


def _overrides() -> list[str]:
    """The overrides of the command line; none when the library is used without Hydra's front."""
    from hydra.core.hydra_config import HydraConfig

    from prl.config.composing import task_overrides

    return task_overrides(HydraConfig.get()) if HydraConfig.initialized() else []


def _new_run_id(plan: RunPlan) -> str:
    return f"{plan.point_id}-{secrets.token_hex(3)}"


def _environment(plan: RunPlan) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "run_id": _new_run_id(plan),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": versions,
        **describe_inputs(plan.config),
        "config_dirs": [str(path) for path in directories()],
    }
