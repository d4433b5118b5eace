"""The environment variables of a child: its CPU threads, its devices, the run's marker."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from prl.planning.run_plan import RolePlan, RunPlan
from prl.runtime.reaper import MARKER

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


def child_environment(plan: RunPlan, role: RolePlan | None, marker: str) -> dict[str, str]:
    """Variables on top of the root's own. `role` is None for the metrics mirror.

    They are set before the child starts, because OpenMP and CUDA read theirs when torch is loaded.
    """
    threads = num_threads(plan) if role is not None and role.devices else 1
    variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
    variables |= {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false", MARKER: marker}
    variables["CUDA_VISIBLE_DEVICES"] = visible_devices(plan, role)
    return variables


def num_threads(plan: RunPlan) -> int:
    """CPU threads of an inference or trainer child."""
    if plan.config.debug.num_threads:
        return plan.config.debug.num_threads
    engines, ranks = len(plan.roles_of("inference")), len(plan.roles_of("trainer"))
    takes_turns = plan.config.deployment.type == "colocated"
    return max(1, num_cores() // max(1, max(engines, ranks) if takes_turns else engines + ranks))


def num_cores() -> int:
    """CPU cores that this process may use: its affinity mask, or the quota of its control group if that is less."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):
        quota, period = CGROUP_CPU.read_text().split()
        cores = min(cores, max(1, int(quota) // int(period)))  # "max" is no number: no quota
    return cores


def visible_devices(plan: RunPlan, role: RolePlan | None) -> str:
    """CUDA_VISIBLE_DEVICES of a child: its devices as the root numbers them; none for roles without devices."""
    if role is None or plan.config.deployment.device == "cpu":
        return ""
    outer = os.environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return ",".join(str(device) for device in role.devices)
    names = [name for name in outer.split(",") if name.strip()]
    return ",".join(names[device] for device in role.devices if device < len(names))
