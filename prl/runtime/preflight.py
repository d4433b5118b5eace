"""What can only be known on this machine, and is asked before anything is made: places, packages and GPUs of a run."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from prl.config.errors import UnfitMachineError, UserError
from prl.config.hub import is_path
from prl.config.packages import DATASETS, DEEP_EP, MATH_VERIFY, ROUTER, VERIFIERS, VLLM
from prl.config.schema import RunConfig
from prl.config.wanted import wanted_packages
from prl.config.world import world_of
from prl.planning.run_plan import RunPlan
from prl.runtime.hub_names import names_of_hub, out_of_reach
from prl.runtime.process.gpus import lacks_all_gpus, refuse_too_few_gpus, too_few_gpus
from prl.runtime.warm_cache import missing_in_cache

CACHE_KEY = "cache_dir"
PLAN = "plan.json"
PLAIN = (VLLM, ROUTER, DATASETS, MATH_VERIFY, VERIFIERS)


def check_machine(config: RunConfig, alone: RunPlan | None = None, starts_all: bool = False) -> None:
    """Raise UserError for directories that cannot be made, models, tokenizers and kernels that are not there and hosts
    without address: UnfitMachineError for several at once.

    Args:
        alone: the plan, if all of it runs on this machine, which then must have the GPUs for it.
        starts_all: whether this process starts all roles, so that they have the packages that it has.
    """
    found = list(_lacking(config, alone))
    if starts_all:
        found += _absent_packages(config)
    if found and starts_all:
        found += _told_beside(config, alone)
    if len(found) == 1:
        raise found[0]
    if found:
        raise UnfitMachineError(found)


def _lacking(config: RunConfig, alone: RunPlan | None) -> Iterator[UserError]:
    world = world_of(config)
    checks: list[Callable[[], None]] = [partial(_check_model, config), partial(_check_tokenizer, config)]
    if missing_in_cache(config) is not None:  # else it may be a mount that is only read
        checks.insert(0, partial(check_directory, Path(config.cache_dir), CACHE_KEY, "cache_dir=~/.cache/prl"))
    if world.has_trainers:
        checks.append(partial(_check_deepep, config))
    if world.has_engines:
        checks.append(partial(_check_host, config.inference.host))
    if alone is not None:
        checks.append(partial(refuse_too_few_gpus, alone))
    for check in checks:
        try:
            check()
        except UserError as error:
            yield error


def _absent_packages(config: RunConfig) -> Iterator[UserError]:
    """Of those whose module alone tells whether they are there; the others are looked for by the roles."""
    for package, choice in wanted_packages(config, world_of(config)):
        if package in PLAIN and find_spec(package.module) is None:
            why = f"{choice} needs the package {package.module}"
            yield UserError(f"{package.name} is not installed.", where=choice, why=why, fix=package.install)


def _told_beside(config: RunConfig, alone: RunPlan | None) -> Iterator[UserError]:
    """What a run that is refused anyway lacks besides, as far as can be seen: GPUs of a driver that does not count
    them, and what it would ask the Hugging Face hub for.
    """
    if alone is not None and too_few_gpus(alone) is None and (no_gpu := lacks_all_gpus(alone)) is not None:
        yield no_gpu
    wanted = [name for name in names_of_hub(config) if not name.is_cached()]
    why = out_of_reach() if wanted else None
    if why is not None:
        for name in wanted:
            yield UserError(f"{name.name!r} is not on this machine.", where=name.where, why=why, fix=name.fix)


def check_directory(path: Path, key: str, fix: str) -> None:
    """Raise UserError unless `path` is a directory to write to, or one can be made there. Nothing stays."""
    path = path.expanduser().absolute()
    nearest = path
    try:
        while not nearest.exists():
            nearest = nearest.parent
    except OSError as error:  # a name too long
        raise _no_directory(path, key, str(error.strerror), fix) from error
    if not nearest.is_dir():
        raise _no_directory(path, key, f"{nearest} is a file", fix)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".prl-", dir=nearest))  # only trying tells, on file systems and for root
    except OSError as error:
        raise _no_directory(path, key, f"{nearest} cannot be written to: {error.strerror}", fix) from error


def _no_directory(path: Path, key: str, why: str, fix: str) -> UserError:
    return UserError(f"{path} cannot be made", where=f"{key}={path}", why=why, fix=fix)


def _check_model(config: RunConfig) -> None:
    """A directory by its name; other names are the hub's. One that has made what it is for need not be there."""
    name = config.model.path
    if name is None or not is_path(name) or Path(name).is_dir():
        return
    resumes = config.output_dir is not None and (Path(config.output_dir).expanduser() / PLAN).exists()
    if resumes or (config.warm_start is not None and missing_in_cache(config) is None):
        return
    path = Path(name).expanduser().absolute()
    raise UserError(
        f"There is no directory {path}.",
        where=f"model.path={name}",
        why="it is to hold the weights of the model"
        + (f"; {path.parent} has {_listed(path.parent)}" if path.parent.is_dir() else ""),
        fix="model.path=/path/to/checkpoint",
    )


def _listed(folder: Path, most: int = 5) -> str:
    try:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return "nothing that can be read"
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") or "no directories"


def _check_tokenizer(config: RunConfig) -> None:
    """Names of the hub are left to those who load them."""
    name = config.model.tokenizer
    if name is None or not name.startswith(("/", "./", "../", "~")):
        return
    if not Path(name).is_dir():
        raise UserError(
            f"there is no tokenizer at {name!r}",
            where=f"model.tokenizer={name}",
            why="it is not a directory",
            fix="model.tokenizer=byte" if config.model.path is None else "model.tokenizer=null",
        )


def _check_deepep(config: RunConfig) -> None:
    if config.parallelism.ep_comm_backend == "deepep" and find_spec(DEEP_EP.module) is None:
        raise UserError(
            "DeepEP is not installed.",
            where="parallelism.ep_comm_backend=deepep",
            why=f"the Python package {DEEP_EP.module} is not there; it is built from source, for Hopper or newer GPUs "
            "that see each other over NVLink, and between nodes with NVSHMEM over RDMA",
            fix=f"parallelism.ep_comm_backend=torch, or: {DEEP_EP.install}",
        )


def _check_host(host: str) -> None:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"the host {host!r} has no address",
            where=f"inference.host={host}",
            why=getattr(error, "strerror", None) or str(error),
            fix="inference.host=127.0.0.1",
        ) from error
