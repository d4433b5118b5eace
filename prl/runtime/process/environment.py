"""The environment variables of a child: its CPU threads, its devices, the run's marker."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

from prl.planning.commands import ALLOCATOR, IDLE_THREADS, computing_processes, trainer_environment
from prl.planning.run_plan import RolePlan, RunPlan
from prl.planning.vllm_arguments import engine_environment
from prl.runtime.process.ports import LOOPBACK
from prl.runtime.process.python_path import python_path
from prl.runtime.process.reaper import MARKER

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
ALLOCATORS = (ALLOCATOR, "PYTORCH_CUDA_ALLOC_CONF")  # the latter is its old name
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
NCCL_ADAPTERS = "NCCL_IB_HCA"
INFINIBAND = Path("/sys/class/infiniband")
SIOCGIFADDR = 0x8915  # <linux/sockios.h>
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")


def child_environment(plan: RunPlan, role: RolePlan | None, marker: str, address: str | None = None) -> dict[str, str]:
    """Variables on top of the root's own (or its agent's). `role` is None for the metrics mirror.

    They are set before the child starts, because OpenMP and CUDA read theirs when torch is loaded.

    Args:
        address: of this node, as other nodes reach it; None for a run on one node.
    """
    node = None if role is None or address == LOOPBACK else role.node
    threads = num_threads(plan, node) if role is not None and role.devices else 1
    variables = dict.fromkeys(THREAD_VARIABLES, str(threads))
    variables |= {
        "PYTHONPATH": python_path(),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        MARKER: marker,
    }
    if os.environ.keys().isdisjoint(WAIT_VARIABLES):
        variables |= IDLE_THREADS
    variables["CUDA_VISIBLE_DEVICES"] = visible_devices(plan, role)
    if role is not None and role.engine is not None:
        variables |= engine_environment(plan.config, role.engine)
    if role is not None and role.role == "trainer" and os.environ.keys().isdisjoint(ALLOCATORS):
        variables |= trainer_environment(plan.config)
    return interfaces(address or LOOPBACK) | variables


def interfaces(address: str) -> dict[str, str]:
    """Where gloo and NCCL listen, unless the user has said so: on the interface of this node's address.

    Between machines NCCL is left to choose the interface. Of adapters it takes those of InfiniBand that are up, where
    there are any: left alone it takes RoCE on a network of Ethernet beside them, too, which may lead nowhere.
    """
    names = (GLOO_INTERFACE, NCCL_INTERFACE) if address == LOOPBACK else (GLOO_INTERFACE,)
    interface, ports = interface_of(address), [] if address == LOOPBACK else infiniband_ports()
    found = {} if interface is None else dict.fromkeys(names, interface)
    found |= {NCCL_ADAPTERS: "=" + ",".join(ports)} if ports else {}
    return {name: value for name, value in found.items() if name not in os.environ}


def infiniband_ports() -> list[str]:
    """ADAPTER:PORT of the ports of InfiniBand (not of RoCE) that are up, as NCCL_IB_HCA names them."""
    found = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        with contextlib.suppress(OSError):
            is_up, layer = "ACTIVE" in (port / "state").read_text(), (port / "link_layer").read_text().strip()
            if is_up and layer == "InfiniBand":
                found.append(f"{port.parent.parent.name}:{port.name}")
    return found


def interface_of(address: str) -> str | None:
    """Network interface that has an IPv4 address, where the system tells (Linux).

    Gloo left alone takes what the host's name resolves to, which on many hosts is the loopback.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def num_threads(plan: RunPlan, node: int | None = None) -> int:
    """CPU threads of an inference or trainer child on a node; None: all nodes are this machine."""
    if plan.config.debug.num_threads:
        return plan.config.debug.num_threads
    return max(1, num_cores() // computing_processes(plan, node))


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
