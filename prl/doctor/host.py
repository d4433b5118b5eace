"""What the operating system allows and says of itself: limits, ports, the clock, InfiniBand."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
import time
from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
PEER_MEMORY = (Path("/sys/module/nvidia_peermem"), Path("/sys/module/nv_peer_mem"))
NEWER_THAN = 1_735_689_600  # 2025-01-01: a clock that shows less was never set
TIME_ERROR = 5  # <sys/timex.h>: the kernel's clock is not synchronised
UNLIMITED = resource.RLIM_INFINITY


@dataclass(frozen=True)
class HostFacts:
    open_files: tuple[int, int] = (UNLIMITED, UNLIMITED)  # soft and hard limit
    memlock: tuple[int, int] = (UNLIMITED, UNLIMITED)  # bytes
    processes: tuple[int, int] = (UNLIMITED, UNLIMITED)
    free_ports: int = 0  # how many the system gives out by itself
    can_listen: str = ""  # why not, on the loopback
    port_taken: str = ""  # why inference.port cannot be had
    address: str = ""  # under which other machines may reach this one; empty for none
    clock_set: bool = True
    clock_synchronised: bool | None = None  # None: the kernel does not say
    infiniband: tuple[str, ...] = ()  # "mlx5_0 400 Gb/sec InfiniBand" of ports that are active
    infiniband_down: tuple[str, ...] = ()
    peer_memory: bool = False  # GPUs can be read by the network card


def look_at_host(port: int) -> HostFacts:
    up, down = infiniband(INFINIBAND)
    return HostFacts(
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        memlock=resource.getrlimit(resource.RLIMIT_MEMLOCK),
        processes=resource.getrlimit(resource.RLIMIT_NPROC),
        free_ports=_port_range(),
        can_listen=_listen(0),
        port_taken=_listen(port) if port else "",
        address=_address(),
        clock_set=time.time() > NEWER_THAN,
        clock_synchronised=_synchronised(),
        infiniband=up,
        infiniband_down=down,
        peer_memory=any(path.is_dir() for path in PEER_MEMORY),
    )


def infiniband(root: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Ports that are active, and those that are not, as /sys/class/infiniband shows them; without those of RoCE, which
    stand there, too, and which runs leave alone (prl/runtime/process/environment.py).
    """
    up: list[str] = []
    down: list[str] = []
    for port in sorted(root.glob("*/ports/*")):
        text = {name: _read(port / name) for name in ("state", "rate", "link_layer")}
        if text["link_layer"] == "Ethernet":
            continue
        said = f"{port.parent.parent.name} {' '.join(text['rate'].split()[:2])} {text['link_layer']}".strip()
        (up if "ACTIVE" in text["state"] else down).append(said)
    return tuple(up), tuple(down)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _port_range() -> int:
    numbers = [int(number) for number in re.findall(r"\d+", _read(PORT_RANGE))]
    return numbers[1] - numbers[0] + 1 if len(numbers) == 2 else 0


def _listen(port: int) -> str:
    try:
        with socket.create_server(("127.0.0.1", port)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _address() -> str:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("10.255.255.255", 9))  # nothing is sent: it asks which address the default route has
        return str(probe.getsockname()[0])
    return ""


def _synchronised() -> bool | None:
    """What adjtimex(2) says, asked without changing anything."""
    try:
        libc = ctypes.CDLL(None)
        code = libc.adjtimex(ctypes.create_string_buffer(512))  # struct timex, all zero: modes = 0
    except (OSError, AttributeError):
        return None
    return None if code < 0 else code != TIME_ERROR


def shared_memory_gib() -> float | None:
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return None
    return space.f_bavail * space.f_frsize / 2**30
