"""Which process a number in a file means: numbers are used again, on this machine and on every other.

A record of a process says where and when it was started; nobody is sent a signal who does not fit it.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
Whereabouts = Literal["alive", "gone", "elsewhere", "unknown"]


def describe_process(pid: int | None = None) -> dict[str, Any]:
    """A record of this process, or of another one of this machine."""
    number = os.getpid() if pid is None else pid
    return {"pid": number, "host": platform.node(), "system": system_of_processes(), "started": start_of(number)}


def job_name() -> str | None:
    """As squeue shows it: 123_4 for an array element, whose SLURM_JOB_ID may be that of the whole array."""
    array, index = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{index}" if array and index else os.environ.get("SLURM_JOB_ID")


def system_of_processes() -> str:
    """What numbers processes here: this boot of the kernel, and the container."""
    with contextlib.suppress(OSError):
        return f"{BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return platform.node()  # without /proc a machine is known by its name


def start_of(pid: int) -> str | None:
    """When a process was started, in whatever unit; None if it is gone, or only its parent has not noticed yet."""
    with contextlib.suppress(OSError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else fields[19].decode()
    if Path("/proc/self").exists():
        return None
    asked = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def seconds_since_start() -> float:
    """For how long this process has been there; 0 where the system does not tell."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
        up_s = float(Path("/proc/uptime").read_text().split()[0])
        return max(0.0, up_s - ticks / os.sysconf("SC_CLK_TCK"))
    return 0.0


def find_process(record: Any) -> Whereabouts:
    """What has become of a process.

    Returns: "elsewhere" for one of another machine, container or boot; "unknown" for a record that says too little.
    """
    if not isinstance(record, Mapping) or not isinstance(record.get("pid"), int) or not record.get("started"):
        return "unknown"
    if record.get("system") != system_of_processes():
        return "elsewhere"
    return "alive" if start_of(record["pid"]) == record["started"] else "gone"


def signal_process(record: Mapping[str, Any], number: signal.Signals) -> Whereabouts:
    """Send a signal to the process of a record, if it is alive here, and to no other. Returns where it is."""
    if find_process(record) != "alive":
        return find_process(record)
    if not hasattr(os, "pidfd_open"):
        os.kill(record["pid"], number)
        return "alive"
    try:
        handle = os.pidfd_open(record["pid"])  # from here on the number means this process
    except ProcessLookupError:
        return "gone"
    try:
        where = find_process(record)
        if where == "alive":
            signal.pidfd_send_signal(handle, number)
        return where
    except ProcessLookupError:
        return "gone"
    finally:
        os.close(handle)
