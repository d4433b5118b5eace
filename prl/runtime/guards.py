"""What a child does to itself first: die with its parent, dump stacks on request, turn signals into a flag."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STACK_DUMP_SIGNAL = signal.SIGUSR1


class StopFlag:
    """Set by SIGTERM or SIGINT, read by main loops. The handler does nothing else."""

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._set)

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


def die_with_parent(parent_pid: int) -> None:
    """SIGKILL for this process when its parent goes (Linux). The reaper covers other systems and other descendants."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the line above
        os._exit(1)


def dump_stacks_on_signal() -> None:
    """Python stacks of all threads to stderr (the log): on a crash, and on SIGUSR1 from the supervisor."""
    faulthandler.enable()
    faulthandler.register(STACK_DUMP_SIGNAL, all_threads=True)
