"""One child process as the supervisor sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from prl.planning.run_plan import RolePlan
from prl.runtime.directory.heartbeat import Pulse
from prl.runtime.process.child import Boot
from prl.runtime.process.failures import RECORD_BYTES, count_oom_kills, parse_error_record
from prl.runtime.process.guards import STACK_DUMP_SIGNAL, STOP_SIGNAL, held_back
from prl.runtime.process.python_path import python_command
from prl.runtime.process.reaper import Reaper


def log_path(run_dir: Path, name: str, role: RolePlan | None) -> Path:
    """logs/ROLE.NODE.RANK.log, for an environment logs/env.NAME.NODE.RANK.log; without a role: logs/NAME.log."""
    if role is None:
        return run_dir / "logs" / f"{name}.log"
    what = f"env.{name.partition('/')[2]}" if role.role == "env" else role.role
    return run_dir / "logs" / f"{what}.{role.node}.{role.rank}.log"


def link_latest(log: Path, role: RolePlan) -> None:
    """logs/latest.ROLE.log -> the log of the role's first process, on whichever node that is."""
    if role.index == 0:
        link, partial = log.with_name(f"latest.{role.role}.log"), log.with_name(f".latest.{role.role}.log")
        with contextlib.suppress(OSError):  # some filesystems have no links, and no run fails for that
            partial.unlink(missing_ok=True)
            partial.symlink_to(log.name)
            os.replace(partial, link)


class ChildProcess:
    """Start, watch, stop. A restart is a new process under the same name."""

    def __init__(self, run_dir: Path, name: str, role: RolePlan | None, reaper: Reaper) -> None:
        self.run_dir, self.name, self.role, self.reaper = run_dir, name, role, reaper
        self.log = log_path(run_dir, name, role)
        self.oom_kills_before = 0
        self.restarts = 0
        self.exit_code: int | None = None
        self.error: dict[str, Any] = {}  # of `parse_error_record`, once it has failed

    def start(self, boot: Boot, environment: dict[str, str]) -> None:
        """Spawn `python -m prl.runtime.process.child` in its own session, stdout and stderr going to its log.

        From the main thread only: PR_SET_PDEATHSIG fires when the *thread* that forked ends (prctl(2)).
        """
        self.log.parent.mkdir(parents=True, exist_ok=True)
        if self.role is not None:
            link_latest(self.log, self.role)
        self.pulse = Pulse(self.run_dir, self.name)
        self.exit_code, self.error = None, {}
        self.oom_kills_before = count_oom_kills()
        self._error_pipe, error_fd = os.pipe()
        with open(self.log, "ab") as log:
            with contextlib.suppress(OSError):  # a full disk
                log.write(f"--- {self.name} starts {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
                log.flush()
            with held_back():
                self.popen = subprocess.Popen(
                    python_command("prl.runtime.process.child", str(self.run_dir), self.name),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **environment},
                    start_new_session=True,
                    pass_fds=[fd for fd in (boot.listen_fd, error_fd) if fd is not None],
                )
        os.close(error_fd)
        self.reaper.tell(f"+{self.popen.pid}")
        assert self.popen.stdin is not None
        with contextlib.suppress(OSError):  # it is dead already, and poll() will say so
            self.popen.stdin.write(replace(boot, error_fd=error_fd).to_json().encode())
            self.popen.stdin.close()

    def poll(self) -> int | None:
        """The exit code, or None while it runs. What is left of its process group goes with it."""
        if self.exit_code is None and self._has_exited():
            # before it is reaped its pid, which names the group, cannot be taken by another process
            self._signal_group(signal.SIGKILL)
            self.exit_code = self.popen.wait()
            self.reaper.tell(f"-{self.popen.pid}")
            self._read_error()
        return self.exit_code

    @property
    def oom_kills(self) -> int:
        """Processes of this node that the kernel has killed for memory since the child was started."""
        return count_oom_kills() - self.oom_kills_before

    def _read_error(self) -> None:
        os.set_blocking(self._error_pipe, False)  # a process it left may hold the other end
        with contextlib.suppress(BlockingIOError):
            self.error = parse_error_record(os.read(self._error_pipe, RECORD_BYTES))
        os.close(self._error_pipe)

    def _has_exited(self) -> bool:
        return os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    @property
    def alive(self) -> bool:
        return self.poll() is None

    def terminate(self) -> None:
        """Ask it to finish."""
        if self.alive:
            self.popen.send_signal(STOP_SIGNAL)

    def kill(self) -> None:
        if self.alive:
            self._signal_group(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Have it write the Python stacks of its threads into its log."""
        if self.alive:
            self.popen.send_signal(STACK_DUMP_SIGNAL)

    def wait(self, timeout_s: float) -> bool:
        """Whether it ended within the time."""
        deadline = time.monotonic() + timeout_s
        while self.alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        return True

    def _signal_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)

    def snapshot(self) -> dict[str, Any]:
        """For status.json."""
        exit_code = self.poll()
        state = "exited" if exit_code is not None else "ready" if self.pulse.ready else "starting"
        return {"pid": self.popen.pid, "state": state, "exit": exit_code, "restarts": self.restarts}
