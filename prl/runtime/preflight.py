"""What can only be known on this machine, and is asked before anything is made: places and packages of a run."""

from __future__ import annotations

import os
import socket
import tempfile
from importlib.util import find_spec
from pathlib import Path

from prl.config.errors import UserError
from prl.config.packages import DEEP_EP
from prl.config.schema import RunConfig
from prl.config.world import world_of
from prl.runtime.warm_cache import missing_in_cache

CACHE_KEY = "cache_dir"


def check_machine(config: RunConfig) -> None:
    """Raise UserError for directories that cannot be made, tokenizers and kernels that are not there and hosts without
    address.
    """
    if missing_in_cache(config) is not None:  # else it may be a mount that is only read
        check_directory(Path(config.cache_dir), CACHE_KEY, "cache_dir=~/.cache/prl")
    _check_tokenizer(config)
    world = world_of(config)
    if world.has_trainers:
        _check_deepep(config)
    if world.has_engines:
        _check_host(config.inference.host)


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
