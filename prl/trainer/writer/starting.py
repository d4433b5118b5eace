"""Two ways to start the process that writes, on the main thread: it dies with the thread that started it.

A fork of a trainer that has imported what it needs and begun nothing else costs no time and shares torch's memory. It
is for CPUs: what CUDA has begun does not survive a fork, and who asks whether there is a GPU begins it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, Protocol

from prl.runtime.process.guards import StopFlag, die_with_parent, held_back
from prl.runtime.process.python_path import python_command, python_path
from prl.trainer.writer.serving import serve
from prl.trainer.writer.staging import StagingMemory

MODULE = "prl.trainer.writer"
LOOK_S = 0.02  # between two looks whether a fork has ended
ARGUMENTS = 45  # of the fields of /proc/self/stat behind the name: where the command's begin; the next, where they end


class Process(Protocol):
    pid: int

    def wait(self, timeout: float) -> int:
        """The exit code, negative for a signal. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None: ...


class Started:
    """One rank's process, and what it shares with its trainer."""

    def __init__(self, start: Callable[[tuple[int, int]], Process]) -> None:
        self.memory = StagingMemory()
        ours, theirs = socket.socketpair()
        with held_back():
            self.process = start((self.memory.fd, theirs.fileno()))
        theirs.close()
        self.socket = Connection(ours.detach())


def spawned() -> Started:
    """A process of its own from the beginning."""
    return Started(_spawn)


def forked() -> Started:
    """Of a trainer that has no thread yet."""
    return Started(_fork)


def _spawn(inherited: tuple[int, int]) -> Process:
    return subprocess.Popen(
        python_command(MODULE, str(os.getpid()), *map(str, inherited)),
        stdin=subprocess.DEVNULL,
        pass_fds=inherited,
        env={**os.environ, "PYTHONPATH": python_path(), "CUDA_VISIBLE_DEVICES": ""},
    )


def _fork(inherited: tuple[int, int]) -> Process:
    parent = os.getpid()
    gc.freeze()  # what there is stays shared
    pid = os.fork()
    if pid == 0:
        _serve(parent, inherited)
    return Forked(pid)


def _serve(parent: int, inherited: tuple[int, int]) -> NoReturn:
    code = 1
    try:
        die_with_parent(parent)
        StopFlag().install()
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        for name in os.listdir("/proc/self/fd"):  # the supervisor's and the neighbours' are the trainer's alone
            if int(name) > 2 and int(name) not in inherited:
                with contextlib.suppress(OSError):  # that of the list itself
                    os.close(int(name))
        show_as(f"python -m {MODULE} {parent}")
        serve(*inherited)
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    finally:
        os._exit(code)


def show_as(command: str) -> None:
    """What ps tells of this process, which is otherwise what its parent was started with; Linux has no call for it."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[ARGUMENTS]), int(fields[ARGUMENTS + 1])
    words = command.replace(" ", "\0").encode()[: end - begin - 1]
    ctypes.memmove(begin, words.ljust(end - begin, b"\0"), end - begin)


class Forked:
    """As `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(MODULE, timeout)
            else:
                time.sleep(LOOK_S)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
