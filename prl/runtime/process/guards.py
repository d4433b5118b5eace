"""What a child does to itself first: die with its parent, dump stacks on request, turn signals into a flag."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType

PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
STACK_DUMP_SIGNAL = signal.SIGUSR1


# from the supervisor, so that those of others tell apart: a scheduler may send SIGTERM to every process of a job, and a
# server that ended then would be missed by those who still save
STOP_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
HELD_BACK = (STOP_SIGNAL, signal.SIGTERM, signal.SIGINT)


class StopFlag:
    """Set by the supervisor's signal, read by main loops. The handler does nothing else.

    SIGTERM and SIGINT are the root's business. They are caught and not ignored, which programs started here would
    inherit.
    """

    def __init__(self) -> None:
        self.is_set = False

    def install(self) -> None:
        """What came before (`held_back`) is delivered now."""
        signal.signal(STOP_SIGNAL, self._set)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._leave_to_root)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)

    def _leave_to_root(self, number: int, frame: FrameType | None) -> None:
        pass

    def _set(self, number: int, frame: FrameType | None) -> None:
        self.is_set = True


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """What is started meanwhile is not ended by the signals of a StopFlag before it has installed one: they wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
