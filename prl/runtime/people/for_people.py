"""What `python -m prl.inference` tells whoever has started it: where it serves, and the keys of its routes."""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from prl.config.loopback import LOOPBACK_HOSTS
from prl.planning.run_plan import RunPlan
from prl.runtime.nodes.job_nodes import own_hosts
from prl.runtime.process.keys import RunKeys
from prl.runtime.process.ports import ANY_HOST, LOOPBACK

CONTROL_KEY, API_KEY = "control_key", "api_key"  # files in the run directory, while it serves


def is_open(plan: RunPlan) -> bool:
    """Whether sampling wants no key: on a server started for people, on loopback and without a key of theirs. Beyond
    loopback it is the run's own, which they are told.
    """
    inference = plan.config.inference
    is_near = inference.host in LOOPBACK_HOSTS and plan.num_nodes == 1
    return plan.config.job == "inference" and inference.api_key_var is None and is_near


def urls_of(plan: RunPlan, endpoints: Mapping[str, str]) -> list[str]:
    """Of the router, or of each engine, by names that other machines know."""
    front, everywhere = plan.roles_of("router") or plan.servers(), plan.config.inference.host in ANY_HOST
    urls = [endpoints[role.name] for role in front]
    return [url.replace(LOOPBACK, own_hosts()[0]) for url in urls] if everywhere else urls


def hand_out_keys(plan: RunPlan, run_dir: Path, keys: RunKeys, tell: Callable[[str], None], is_private: bool) -> None:
    """Who may pause it or give it other weights; who may sample, unless everybody on this machine may or they have a
    key already.

    Args:
        is_private: whether `tell` reaches whoever has started it and nobody else, unlike a job's log.
    """
    given = [("control", CONTROL_KEY, keys.control)] * (plan.config.inference.control_key_var is None)
    if not is_open(plan) and plan.config.inference.api_key_var is None:
        given.append(("sampling", API_KEY, keys.generate))
    for routes, name, key in given:
        path = run_dir / name
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(key + "\n")
        tell(f"key of the {routes} routes: " + (f"{key} (in {path}, for you alone)" if is_private else f"in {path}"))


def is_told_in_private(is_job: bool) -> bool:
    """Whether what is printed is seen by whoever has started this and nobody else: a log is a file for others, too."""
    with contextlib.suppress(OSError, ValueError):  # no stdout at all
        return not is_job and not stat.S_ISREG(os.fstat(sys.stdout.fileno()).st_mode)
    return False


def take_back_keys(run_dir: Path) -> None:
    """They open nothing any more, so that one that cannot be removed (a disk that became read-only) does no harm."""
    for name in (CONTROL_KEY, API_KEY):
        with contextlib.suppress(OSError):
            (run_dir / name).unlink(missing_ok=True)
