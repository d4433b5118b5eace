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
from prl.planning.run_plan import RunPlan, plan_to_json
from prl.runtime.reaper import process_table

OUTPUTS = Path("outputs")
LOCK = ".lock"
BEFORE_PLAN = {LOCK, "overrides.txt", "env.json", "plan.json.partial"}  # left by a run that was killed while freezing
LOCK_WAIT_S = 10.0  # for the reaper of a killed run to end its last processes
PACKAGES = ("torch", "numpy", "transformers", "hydra-core", "pydantic", "aiohttp", "wandb", "vllm")


@dataclass
class RunDir:
    """A claimed directory. `created`: it was not there before, so a run refused at its start leaves none behind."""

    path: Path
    lock_fd: int
    created: bool
    fresh: bool  # no earlier attempt of this point
    run_id: str = ""  # of this directory: point id and a random part; stays the same when the run resumes

    def release(self) -> None:
        os.close(self.lock_fd)

    def discard(self) -> None:
        """Remove what a run that never began has left: the directory, or its contents if it was there before."""
        for path in list(self.path.iterdir()):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        if self.created:
            with contextlib.suppress(OSError):  # not empty: somebody else's files
                self.path.rmdir()
                self.path.parent.rmdir()


def claim(plan: RunPlan) -> RunDir:
    """Take the run directory of a plan and freeze the plan in it.

    `output_dir` unset: a new directory under outputs/. Set: fresh if empty or absent, resumed if of the same point.
    Raises UserError if it belongs to something else, or if its run is alive.
    """
    wanted = plan.config.output_dir
    if wanted is None:
        path, created = _make_unique(plan.config.name), True
    else:
        path = Path(wanted).expanduser().absolute()
        created = not path.exists()
        refuse_foreign(path, plan)
        _make(path)
    lock_fd = _lock(path)
    fresh = not (path / "plan.json").exists()
    run_dir = RunDir(path, lock_fd, created, fresh)
    if fresh:
        try:
            _freeze(path, plan)
        except OSError as error:
            run_dir.discard()
            run_dir.release()
            raise _not_writable(path, error) from error
    run_dir.run_id = json.loads((path / "env.json").read_text())["run_id"]
    return run_dir


def refuse_foreign(path: Path, plan: RunPlan) -> None:
    """UserError unless the directory is absent, empty, or of the same point."""
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is not a directory", where="output_dir", fix="name another directory")
    names = {entry.name for entry in path.iterdir()} - BEFORE_PLAN
    if not names:
        return
    other = "output_dir=ANOTHER_DIRECTORY, or leave output_dir out for a fresh one"
    if "plan.json" not in names:
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
            why=f"its point is {found}, this configuration is {plan.point_id}; only the same point resumes",
            fix=other,
        )


def read_point_id(path: Path) -> str:
    """The point id in plan.json; "unreadable" if it is damaged."""
    try:
        return json.loads((path / "plan.json").read_text())["point_id"]
    except (OSError, ValueError, KeyError, TypeError):
        return "unreadable"


def is_locked(path: Path) -> bool:
    """Whether a run lives in this directory."""
    try:
        fd = os.open(path / LOCK, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _make_unique(name: str) -> Path:
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
    return UserError(
        f"the run directory {path} cannot be made: {error.strerror}",
        where="output_dir",
        fix="output_dir=A_WRITABLE_DIRECTORY",
    )


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
            holder = os.pread(fd, 32, 0).decode().strip()
            if _is_alive(holder) or time.monotonic() > deadline:
                os.close(fd)
                raise UserError(
                    f"a run is alive in {path} (process {holder})",
                    where="output_dir",
                    why="two runs never share a directory",
                    fix="stop it first, or name another output_dir",
                ) from None
            time.sleep(0.05)
    with contextlib.suppress(OSError):  # a full disk; the holder's pid is only for messages
        os.truncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _is_alive(pid: str) -> bool:
    """Whether the holder of a lock lives, as far as this host can tell."""
    try:
        number = int(pid)
        os.kill(number, 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    table = process_table()  # without zombies
    return not table or number in table


def _freeze(path: Path, plan: RunPlan) -> None:
    """plan.json last: it is what makes the directory a run's."""
    (path / "overrides.txt").write_text("".join(f"{line}\n" for line in _overrides()))
    (path / "env.json").write_text(json.dumps(_environment(plan), indent=1) + "\n")
    partial = path / "plan.json.partial"
    partial.write_text(plan_to_json(plan))
    os.replace(partial, path / "plan.json")


def _overrides() -> list[str]:
    """The overrides of the command line; none when the library is used without Hydra's front."""
    from hydra.core.hydra_config import HydraConfig

    return list(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []


def _environment(plan: RunPlan) -> dict[str, Any]:
    versions = {}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return {
        "run_id": f"{plan.point_id}-{secrets.token_hex(3)}",
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu_count": os.cpu_count(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "packages": versions,
    }
