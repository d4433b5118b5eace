"""What is left of this machine's memory."""

from __future__ import annotations

from pathlib import Path

PROCESS_GIB = 0.15  # of its own, of a process that has imported torch (0.38 resident, libraries included)
MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """What the kernel says can be had without swapping; None where it does not say. A cgroup's limit may be lower."""
    try:
        lines = MEMINFO.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None
